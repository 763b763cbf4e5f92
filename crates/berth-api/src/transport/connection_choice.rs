//! Connection choice for a request, and back-off of dials. Pure.
//!
//! A server limits the concurrent requests of a connection; beyond that a request waits until another ends, and a watch
//! may last an hour. Requests that must not wait have connections of their own. Implements spec 10 §8.2, choice of
//! connections.

use std::time::Duration;

use berth_sys::backoff::Backoff;

/// Traffic type of a pool.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum TrafficType {
    /// Lease and node status only.
    Beat,
    /// Writes, reads and lists.
    Unary,
    /// Watches.
    Watch,
}

/// Load of a connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Load {
    /// ID of the connection.
    pub id: u64,
    /// Requests in flight.
    pub streams: usize,
    /// Peer's limit of concurrent requests.
    pub limit: usize,
    /// HTTP/2; otherwise one request at a time.
    pub is_http2: bool,
}

/// Choice for a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Choice {
    /// Use the connection with that ID.
    On(u64),
    /// Use a new connection.
    Dial,
    /// Wait for a free slot.
    Wait,
}

/// Maximum number of requests per connection of the unary pool.
const UNARY_STREAMS: usize = 64;
/// Maximum number of watches per connection.
const WATCH_STREAMS: usize = 80;
/// Slots of the peer's limit that watches leave free.
const SPARE: usize = 20;
/// First back-off of a dialer.
const FIRST_PAUSE: Duration = Duration::from_millis(800);
/// Failures up to which the heartbeat pool retries fast, about a minute: most outages are over by then, and the other
/// pools rely on its result.
const EAGER: u32 = 30;

impl TrafficType {
    /// Metric label.
    pub fn label(self) -> &'static str {
        match self {
            Self::Beat => "beat",
            Self::Unary => "unary",
            Self::Watch => "watch",
        }
    }

    /// Maximum number of concurrent requests on a connection.
    fn room(self, load: &Load) -> usize {
        match self {
            _ if !load.is_http2 => 1,
            Self::Beat => load.limit.max(1),
            Self::Unary => load.limit.clamp(1, UNARY_STREAMS),
            Self::Watch if load.limit > SPARE => (load.limit - SPARE).min(WATCH_STREAMS),
            Self::Watch => (load.limit / 2).max(1),
        }
    }

    /// Maximum number of connections. HTTP/1.1 needs one for each watch.
    fn connections(self, is_http2: bool) -> usize {
        match (self, is_http2) {
            (Self::Beat, true) => 1,
            (Self::Beat, false) => 2,
            (Self::Unary, true) => 4,
            (Self::Unary, false) => 8,
            (Self::Watch, _) => 2000,
        }
    }

    /// Longest back-off after that many consecutive failures.
    fn longest_pause(self, failures: u32) -> Duration {
        Duration::from_secs(match self {
            Self::Beat if failures <= EAGER => 2,
            Self::Beat => 6,
            Self::Unary | Self::Watch => 30,
        })
    }
}

/// Chooses the connection for a request; `avoid` is a connection that does not respond.
pub fn choose(kind: TrafficType, loads: &[Load], avoid: Option<u64>) -> Choice {
    let free = loads.iter().filter(|load| Some(load.id) != avoid && load.streams < kind.room(load));
    let best = match kind {
        // The fullest, so that empty connections can be closed.
        TrafficType::Watch => free.max_by_key(|load| load.streams),
        TrafficType::Beat | TrafficType::Unary => free.min_by_key(|load| load.streams),
    };
    if let Some(load) = best {
        return Choice::On(load.id);
    }
    let others = loads.iter().filter(|load| Some(load.id) != avoid);
    let is_http2 = loads.iter().all(|load| load.is_http2);
    if others.count() < kind.connections(is_http2) { Choice::Dial } else { Choice::Wait }
}

/// Back-off after that many consecutive failures (from 1); `chance` in 0..1 is the jitter.
pub fn pause(kind: TrafficType, failures: u32, chance: f64) -> Duration {
    let backoff = Backoff::new(FIRST_PAUSE, kind.longest_pause(failures)).with_jitter(0.9, 1.0);
    backoff.nth_with(failures.saturating_sub(1), chance)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn load(id: u64, streams: usize, limit: usize) -> Load {
        Load { id, streams, limit, is_http2: true }
    }

    #[test]
    fn requests_find_their_place() {
        let full = [load(1, 64, 100), load(2, 64, 100), load(3, 64, 100), load(4, 64, 250)];
        let http1: Vec<Load> = (0..8).map(|id| Load { id, streams: 1, limit: 1, is_http2: false }).collect();
        for (what, kind, loads, avoid, expected) in [
            ("nothing yet", TrafficType::Unary, &[][..], None, Choice::Dial),
            ("the emptiest", TrafficType::Unary, &[load(1, 3, 100), load(2, 2, 100)], None, Choice::On(2)),
            ("another", TrafficType::Unary, &full[..3], None, Choice::Dial),
            ("four are enough", TrafficType::Unary, &full, None, Choice::Wait),
            ("AC-10-7", TrafficType::Unary, &http1, None, Choice::Wait),
            ("AC-10-7, seven", TrafficType::Unary, &http1[..7], None, Choice::Dial),
            ("a peer with few places", TrafficType::Unary, &[load(1, 10, 10)], None, Choice::Dial),
            ("the fullest", TrafficType::Watch, &[load(1, 3, 100), load(2, 2, 100)], None, Choice::On(1)),
            ("AC-10-6", TrafficType::Watch, &[load(1, 80, 100)], None, Choice::Dial),
            ("80 of any number", TrafficType::Watch, &[load(1, 80, usize::MAX)], None, Choice::Dial),
            ("30 - 20", TrafficType::Watch, &[load(1, 9, 30)], None, Choice::On(1)),
            ("30 - 20, full", TrafficType::Watch, &[load(1, 10, 30)], None, Choice::Dial),
            ("one place", TrafficType::Watch, &[load(1, 0, 1)], None, Choice::On(1)),
            ("a watch each", TrafficType::Watch, &http1, None, Choice::Dial),
            ("one heartbeat", TrafficType::Beat, &[load(1, 5, 100)], None, Choice::On(1)),
            ("AC-10-5", TrafficType::Beat, &[load(1, 5, 100)], Some(1), Choice::Dial),
            ("both hang", TrafficType::Beat, &[load(1, 5, 100), load(2, 100, 100)], Some(1), Choice::Wait),
        ] {
            assert_eq!(choose(kind, loads, avoid), expected, "{what}");
        }
    }

    #[test]
    fn a_server_that_is_away_is_asked_for_less_and_less() {
        let seconds = |kind: TrafficType, chance| -> Vec<u128> {
            (1..=8).map(|failures| pause(kind, failures, chance).as_millis()).collect()
        };
        assert_eq!(seconds(TrafficType::Beat, 1.0), [800, 1600, 2000, 2000, 2000, 2000, 2000, 2000]);
        assert_eq!(seconds(TrafficType::Watch, 1.0), [800, 1600, 3200, 6400, 12800, 25600, 30000, 30000]);
        assert_eq!(seconds(TrafficType::Watch, 0.0)[..2], [720, 1440]);
        assert_eq!(pause(TrafficType::Watch, u32::MAX, 7.0), Duration::from_secs(30));
        // AC-10-43: attempts in five minutes at the shortest back-off; the other pools wait while heartbeats are tried.
        assert!(300.0 / pause(TrafficType::Beat, 31, 0.0).as_secs_f64() <= 60.0);
        assert!(pause(TrafficType::Unary, 31, 0.0) > pause(TrafficType::Beat, 31, 1.0), "nobody else has a turn");
    }
}
