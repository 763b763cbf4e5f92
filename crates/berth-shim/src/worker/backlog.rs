//! Bounded output buffer of a slow client, with the time since when it is full. Pure.

use std::{
    collections::VecDeque,
    time::{Duration, Instant},
};

/// Maximum number of bytes buffered per client. Spec 09a §4.
pub const MOST: usize = 1 << 20;
/// Time after which a client with a full buffer is dropped.
pub const PATIENCE: Duration = Duration::from_secs(10);

/// A byte buffer.
#[derive(Debug, Default)]
pub struct Backlog {
    buffer: VecDeque<u8>,
    full_since: Option<Instant>,
}

impl Backlog {
    /// Whether the buffer is empty.
    pub fn is_empty(&self) -> bool {
        self.buffer.is_empty()
    }

    /// Number of buffered bytes.
    pub fn len(&self) -> usize {
        self.buffer.len()
    }

    /// Appends what fits into `room` bytes; the rest is lost to this client.
    pub fn push(&mut self, bytes: &[u8], room: usize, now: Instant) {
        let fits = bytes.len().min(room);
        self.buffer.extend(bytes.iter().take(fits));
        if fits < bytes.len() && self.full_since.is_none() {
            self.full_since = Some(now);
        }
    }

    /// The next bytes to write.
    pub fn front(&self) -> &[u8] {
        self.buffer.as_slices().0
    }

    /// Removes bytes that were written.
    pub fn taken(&mut self, count: usize) {
        if count == 0 {
            return;
        }
        self.buffer.drain(..count.min(self.buffer.len()));
        self.full_since = None;
        if self.buffer.is_empty() {
            self.buffer = VecDeque::new(); // a slow client's megabyte is not kept
        }
    }

    /// When the client is dropped unless it reads until then.
    pub fn dropped_at(&self) -> Option<Instant> {
        self.full_since.map(|since| since + PATIENCE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_backlog_is_full_until_something_is_taken() {
        let start = Instant::now();
        let mut backlog = Backlog::default();
        backlog.push(b"abc", 10, start);
        assert_eq!((backlog.len(), backlog.dropped_at()), (3, None));
        backlog.push(b"defg", 2, start);
        assert_eq!((backlog.len(), backlog.dropped_at()), (5, Some(start + PATIENCE)));
        backlog.push(b"h", 0, start + Duration::from_secs(5));
        assert_eq!(backlog.dropped_at(), Some(start + PATIENCE), "since the first");
        backlog.taken(0);
        assert_eq!(backlog.dropped_at(), Some(start + PATIENCE));
        assert_eq!(backlog.front(), b"abcde");
        backlog.taken(2);
        assert_eq!((backlog.front(), backlog.dropped_at()), (&b"cde"[..], None));
        backlog.taken(9);
        assert!(backlog.is_empty());
    }
}
