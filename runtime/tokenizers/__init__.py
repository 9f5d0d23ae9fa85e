"""Text to token ids and back, and chats."""
