//! Queue of unacknowledged exit events. Pure.

use std::collections::VecDeque;

use super::super::plan::{Exit, ExitEvent, ProcessTarget};

/// Events in the order of their occurrence; repeated to every new agent until acknowledged.
#[derive(Debug, Default)]
pub struct Events {
    last: u64,
    waiting: VecDeque<ExitEvent>,
    /// Number of the last event sent on this connection.
    last_sent: u64,
}

impl Events {
    /// Appends an exit event.
    pub fn push(&mut self, of: ProcessTarget, exit: Exit) {
        self.last += 1;
        self.waiting.push_back(ExitEvent { number: self.last, of, exit });
    }

    /// Removes all events up to this number.
    pub fn acknowledge(&mut self, number: u64) {
        while self.waiting.front().is_some_and(|event| event.number <= number) {
            self.waiting.pop_front();
        }
    }

    /// Resets the sent position for a new connection: its agent knows no events.
    pub fn reset_sent(&mut self) {
        self.last_sent = 0;
    }

    /// Next event to send.
    pub fn next(&self) -> Option<&ExitEvent> {
        self.waiting.iter().find(|event| event.number > self.last_sent)
    }

    /// Marks an event as sent.
    pub fn mark_sent(&mut self, number: u64) {
        self.last_sent = self.last_sent.max(number);
    }

    /// The first `most` events, for the reply to `Hello`; the others follow as events.
    pub fn greeting(&mut self, most: usize) -> Vec<ExitEvent> {
        let events: Vec<ExitEvent> = self.waiting.iter().take(most).cloned().collect();
        self.last_sent = events.last().map_or(self.last_sent, |event| event.number);
        events
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_sent_until_acknowledged() {
        let exit = Exit { code: 0, is_signal: false, at_ns: 0, is_oom: false, oom_kills: 0, lost_lines: 0 };
        let mut events = Events::default();
        for name in ["a", "b", "c"] {
            events.push(ProcessTarget::Container(name.to_owned()), exit);
        }
        assert_eq!(events.next().map(|e| e.number), Some(1));
        events.mark_sent(1);
        assert_eq!(events.next().map(|e| e.number), Some(2));
        events.acknowledge(1);
        events.reset_sent();
        assert_eq!(events.greeting(1).len(), 1);
        assert_eq!(events.next().map(|e| e.number), Some(3), "the greeting contained event 2");
        events.acknowledge(9);
        assert_eq!(events.next(), None);
        events.push(ProcessTarget::Init, exit);
        assert_eq!(events.next().map(|e| e.number), Some(4), "numbers are not used again");
    }
}
