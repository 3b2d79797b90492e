"""Few rows scored and selected in one launch."""
