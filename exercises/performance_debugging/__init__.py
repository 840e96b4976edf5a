"""The replay of the workshop's stages."""
