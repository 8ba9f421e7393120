"""From a prompt and reference images to what the transformer is conditioned on."""
