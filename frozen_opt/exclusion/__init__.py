"""The proof that an optimizer holds nothing frozen: by identity, by memory and by value."""
