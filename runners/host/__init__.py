"""The host agent, which forks the processes of trials on its host, and the protocol of calls to it."""
