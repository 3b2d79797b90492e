"""By one gather: each rank's own k highest scores, of which all ranks' highest are found."""
