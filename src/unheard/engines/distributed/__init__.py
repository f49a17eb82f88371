"""Several processes as one engine: process group, messages, load balancing, replicas of the store, parallel map."""
