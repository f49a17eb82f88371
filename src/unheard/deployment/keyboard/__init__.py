"""A phone's keyboard on a web page, to feel what a model would suggest: one model, or two side by side."""
