"""Rules: state and codecs, without a server."""
