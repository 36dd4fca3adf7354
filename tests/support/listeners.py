"""A listener of a search that records the calls it gets."""

from redline.tuner.listener import SearchListener


class RecordingListener(SearchListener):
    def __init__(self):
        self.messages, self.ended_trials, self.results = [], [], []

    def on_message(self, message):
        self.messages.append(message)

    def on_trial_end(self, trial):
        self.ended_trials.append(trial.number)

    def on_end(self, result):
        self.results.append(result)
