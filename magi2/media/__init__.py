"""Files that people open: videos, sound, and previews of latents."""
