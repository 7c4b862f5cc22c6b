"""What several methods share: prototypes, contrastive training, prompts, distillation, synthetic rows, switches."""
