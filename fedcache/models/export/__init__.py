"""Trained models in the formats of others: a folder for plain torch, ONNX, torch.export, safetensors, scikit-learn."""
