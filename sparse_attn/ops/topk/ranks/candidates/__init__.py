"""Exact top-k over ranks by one gather of each rank's own k highest scores."""
