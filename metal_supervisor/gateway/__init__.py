"""The gateway: one address for all models of this Mac, beside the engines' own addresses."""
