"""Pages of docs/ that are written from tests or by trying out the code."""
