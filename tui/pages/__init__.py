"""The pages: each answers one question about the window, as lines that pure functions make of it."""
