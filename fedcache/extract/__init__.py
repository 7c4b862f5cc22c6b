"""Run frozen backbones over images and write their features into a store."""
