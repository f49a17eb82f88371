"""The paper's models, a chunk of users at a time: every user has a delta of their own, and all take their local steps together."""
