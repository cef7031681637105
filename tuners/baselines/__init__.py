"""What the papers' tuners are held against: fixed settings and policies, random and generic search."""
