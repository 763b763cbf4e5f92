//! Keeps what is asked to a rate: a bucket for each line (spec 10 §2.1, 01 §10.3).
//!
//! Turns are given in the order they are asked for. Watches take none.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use tokio::time::{Instant, sleep_until};
use tracing::info;

use crate::kube::api::Line;

/// A wait that is worth a line in the log.
const LONG: Duration = Duration::from_secs(1);
/// There is such a line at most so often.
const SAID: Duration = Duration::from_secs(10);

/// How much may be asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rate {
    /// Requests per second.
    qps: u32,
    /// Requests at once after a pause.
    burst: u32,
}

impl Rate {
    /// As the configuration spells it: 0 (or less) is not "unlimited", but 5 per second, and 10 at once.
    pub fn of(qps: i32, burst: i32) -> Self {
        let or = |value: i32, default| u32::try_from(value).ok().filter(|value| *value > 0).unwrap_or(default);
        Self { qps: or(qps, 5), burst: or(burst, 10) }
    }
}

impl Default for Rate {
    fn default() -> Self {
        Self::of(50, 100)
    }
}

/// The rate of each line; the heartbeat's has none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rates {
    /// All but the below.
    pub main: Rate,
    /// Events.
    pub events: Rate,
    /// Certificate signing requests; `None`: they share the main one.
    pub certificates: Option<Rate>,
}

/// When the bucket is full again, and the rate.
#[derive(Debug)]
struct Bucket {
    rate: Rate,
    full: Option<Instant>,
}

impl Bucket {
    /// When the next turn is; takes it if that is not after `latest`.
    fn take(&mut self, now: Instant, latest: Instant) -> Result<Instant, Instant> {
        let one = Duration::from_secs(1) / self.rate.qps;
        let base = self.full.map_or(now, |full| full.max(now));
        let room = one * (self.rate.burst - 1);
        let turn = base.checked_sub(room).map_or(now, |free| free.max(now));
        if turn > latest {
            return Err(turn);
        }
        self.full = Some(base + one);
        Ok(turn)
    }
}

/// The buckets.
#[derive(Debug)]
pub struct Pace {
    main: Arc<Mutex<Bucket>>,
    events: Arc<Mutex<Bucket>>,
    certificates: Arc<Mutex<Bucket>>,
    said: Mutex<Option<Instant>>,
}

impl Pace {
    /// With those rates.
    pub fn new(rates: Rates) -> Self {
        let bucket = |rate| Arc::new(Mutex::new(Bucket { rate, full: None }));
        let main = bucket(rates.main);
        let certificates = rates.certificates.map_or_else(|| main.clone(), bucket);
        Self { main, events: bucket(rates.events), certificates, said: Mutex::new(None) }
    }

    /// Waits for the turn of one request; `what` is told where that takes long.
    ///
    /// # Errors
    /// The turn would come after `latest`; it is not taken then.
    pub async fn turn(&self, line: Line, latest: Instant, what: &str) -> Result<(), Late> {
        let bucket = match line {
            Line::Heartbeat => return Ok(()),
            Line::Main => &self.main,
            Line::Events => &self.events,
            Line::Certificates => &self.certificates,
        };
        let now = Instant::now();
        let turn = bucket.lock().unwrap_or_else(PoisonError::into_inner).take(now, latest).map_err(|_| Late)?;
        if turn > now {
            sleep_until(turn).await;
        }
        if turn.duration_since(now) > LONG && self.is_to_be_said(now) {
            info!(delay = ?turn.duration_since(now), request = what, "Waited before sending request");
        }
        Ok(())
    }

    fn is_to_be_said(&self, now: Instant) -> bool {
        let mut said = self.said.lock().unwrap_or_else(PoisonError::into_inner);
        let is_due = said.is_none_or(|last| now.duration_since(last) >= SAID);
        if is_due {
            *said = Some(now);
        }
        is_due
    }
}

/// The turn would come too late.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Late;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_no_freedom() {
        assert_eq!(Rate::of(0, 0), Rate { qps: 5, burst: 10 });
        assert_eq!(Rate::of(-1, 7), Rate { qps: 5, burst: 7 });
        assert_eq!(Rate::of(50, 100), Rate::default());
    }

    async fn took(pace: &Pace, line: Line, turns: u32) -> Vec<u128> {
        let (begun, mut took) = (Instant::now(), Vec::new());
        for _ in 0..turns {
            pace.turn(line, begun + LONG, "x").await.expect("in time");
            took.push((begun.elapsed().as_millis() + 50) / 100);
        }
        took
    }

    #[tokio::test(start_paused = true)]
    async fn after_a_burst_it_goes_slowly() {
        let pace = Pace::new(Rates { main: Rate::of(10, 3), ..Rates::default() });
        assert_eq!(took(&pace, Line::Main, 6).await, [0, 0, 0, 1, 2, 3]);
        tokio::time::advance(Duration::from_secs(10)).await;
        assert_eq!(took(&pace, Line::Main, 3).await, [0, 0, 0], "a pause fills the bucket");
    }

    #[tokio::test(start_paused = true)]
    async fn lines_do_not_wait_for_each_other() {
        let slow = Rate::of(1, 1);
        let pace = Pace::new(Rates { main: slow, events: slow, certificates: None });
        let latest = Instant::now();
        for line in [Line::Main, Line::Events, Line::Heartbeat, Line::Heartbeat] {
            assert_eq!(pace.turn(line, latest, "x").await, Ok(()), "{line:?}");
        }
        assert_eq!(pace.turn(Line::Main, latest, "x").await, Err(Late));
        assert_eq!(pace.turn(Line::Certificates, latest, "x").await, Err(Late), "it is the main one's");
        tokio::time::advance(LONG).await;
        assert_eq!(pace.turn(Line::Certificates, Instant::now(), "x").await, Ok(()), "what was late took no turn");
    }
}
