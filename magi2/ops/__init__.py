"""The model's mathematics on tensors and numbers: no parameters, no configuration, no ranks."""
