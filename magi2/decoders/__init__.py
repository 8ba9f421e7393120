"""From latents to frames and samples."""
