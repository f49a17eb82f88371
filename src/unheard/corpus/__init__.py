"""User-keyed text in, token store out: nothing here knows of models or of torch."""
