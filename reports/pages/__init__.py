"""The pages of a comparison: an overview, and a page per scenario."""
