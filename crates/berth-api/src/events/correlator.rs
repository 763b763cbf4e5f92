//! Event correlator: aggregation, deduplication, and spam filter. Pure.
//!
//! An event passes three stages. Ten distinct but similar events within ten minutes are aggregated into one; a repeated
//! event increments a count; a token bucket per object drops what exceeds its burst. Each stage is an LRU cache of 4096
//! entries.
//!
//! Implements spec 05 §13.1.

use std::{
    collections::HashSet,
    hash::{DefaultHasher, Hash, Hasher},
    time::Duration,
};

use jiff::Timestamp;
use lru::LruCache;

use super::series::{InvolvedObject, Series};
use berth_sys::token_bucket::TokenBucket;

/// Entries per stage.
const KEPT: usize = 4096;
/// Distinct messages from which on similar events are aggregated.
const SIMILAR: usize = 10;
/// Seconds between similar events after which aggregation starts over.
const SIMILAR_WITHIN: f64 = 600.0;
/// Message prefix of an aggregated event.
const COMBINED: &str = "(combined from similar events): ";
/// Size of the token bucket: events of one type about one object at once.
const BURST: u32 = 25;
/// Time in which the bucket regains a token.
const REFILL: Duration = Duration::from_secs(300);
/// Reasons of normal events in a container's life cycle. They have a token bucket of their own, so that a flood of
/// other events does not suppress them.
const LIFE: [&str; 5] = ["Pulled", "Created", "Started", "Killing", "Pulling"];

/// Event before correlation, which may aggregate, count, or drop it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RecordedEvent {
    /// Involved object.
    pub about: InvolvedObject,
    /// Whether its type is `Warning` rather than `Normal`.
    pub warning: bool,
    /// Machine-readable reason.
    pub reason: String,
    /// Human-readable message.
    pub message: String,
    /// Annotations of the event; a series keeps those of its first event.
    pub annotations: Vec<(&'static str, String)>,
}

/// API write that an event requires.
#[derive(Clone, PartialEq, Debug)]
pub enum Send {
    /// Creates the event: the first of a series.
    First(Series),
    /// Patches the count of an existing event.
    Again(Series),
}

struct Similar {
    messages: HashSet<u64>,
    last: Timestamp,
}

struct EventCount {
    name: String,
    first: Timestamp,
    count: i32,
}

/// State of the three stages.
pub struct Correlator {
    similar: LruCache<u64, Similar>,
    counted: LruCache<u64, EventCount>,
    /// Their clock is the time since the Unix epoch.
    buckets: LruCache<u64, TokenBucket<Duration>>,
    last_name: i128,
}

impl Default for Correlator {
    fn default() -> Self {
        // Bounded by `room_for_one`: a bounded cache allocates its capacity at once, and most nodes have few events.
        let (similar, counted, buckets) = (LruCache::unbounded(), LruCache::unbounded(), LruCache::unbounded());
        Self { similar, counted, buckets, last_name: 0 }
    }
}

/// Evicts the least recently used entries while the cache is full.
fn room_for_one<V>(cache: &mut LruCache<u64, V>) {
    while cache.len() >= KEPT {
        cache.pop_lru();
    }
}

impl Correlator {
    /// Correlates an event and returns the write it requires; `None` if the spam filter drops it.
    ///
    /// `fallback` names the series (by a random UUID) if the object's name cannot.
    pub fn take(&mut self, event: RecordedEvent, now: Timestamp, fallback: impl FnOnce() -> String) -> Option<Send> {
        let (message, key) = self.combine(&event, now);
        let series = self.count(&event, message, key, now, fallback);
        if !self.passes(&event, now) {
            return None;
        }
        Some(if series.count == 1 { Send::First(series) } else { Send::Again(series) })
    }

    /// Message after aggregation, and the key of the series.
    fn combine(&mut self, event: &RecordedEvent, now: Timestamp) -> (String, u64) {
        let group = hash(&(event.about.object(), event.warning, &event.reason));
        room_for_one(&mut self.similar);
        let similar = self.similar.get_or_insert_mut(group, || Similar { messages: HashSet::new(), last: now });
        if seconds(similar.last, now) > SIMILAR_WITHIN {
            similar.messages.clear();
        }
        similar.last = now;
        let own = hash(&event.message);
        if similar.messages.len() < SIMILAR {
            similar.messages.insert(own);
        }
        if similar.messages.len() < SIMILAR {
            let key = hash(&(&event.about, event.warning, &event.reason, &event.message));
            return (event.message.clone(), key);
        }
        (format!("{COMBINED}{}", event.message), hash(&("combined", group)))
    }

    fn count(
        &mut self,
        event: &RecordedEvent,
        message: String,
        key: u64,
        now: Timestamp,
        fallback: impl FnOnce() -> String,
    ) -> Series {
        let counted = match self.counted.get_mut(&key) {
            Some(counted) => {
                counted.count = counted.count.saturating_add(1);
                (counted.name.clone(), counted.first, counted.count)
            }
            None => {
                let name = self.name(&event.about, now).unwrap_or_else(fallback);
                room_for_one(&mut self.counted);
                self.counted.put(key, EventCount { name: name.clone(), first: now, count: 1 });
                (name, now, 1)
            }
        };
        let (name, first, count) = counted;
        Series {
            about: event.about.clone(),
            warning: event.warning,
            reason: event.reason.clone(),
            message,
            name,
            first,
            last: now,
            count,
            annotations: event.annotations.clone(),
        }
    }

    /// Takes a token from the event's bucket; false if it is empty.
    fn passes(&mut self, event: &RecordedEvent, now: Timestamp) -> bool {
        let life = !event.warning && LIFE.contains(&event.reason.as_str());
        let key = hash(&(&event.about, event.warning, life));
        room_for_one(&mut self.buckets);
        let now = Duration::try_from(now.duration_since(Timestamp::UNIX_EPOCH)).unwrap_or_default();
        self.buckets.get_or_insert_mut(key, || TokenBucket::new(REFILL, BURST, now)).try_take(now)
    }

    /// `<object>.<hex unix nanos>`, unique within this process.
    fn name(&mut self, about: &InvolvedObject, now: Timestamp) -> Option<String> {
        self.last_name = now.as_nanosecond().max(self.last_name.saturating_add(1));
        let name = format!("{}.{:x}", about.name, self.last_name);
        berth_types::names::dns_subdomain(&name).is_empty().then_some(name)
    }
}

fn seconds(from: Timestamp, to: Timestamp) -> f64 {
    to.duration_since(from).as_secs_f64()
}

/// Hash used as cache key: thousands of long messages would need much memory.
fn hash(value: &impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    value.hash(&mut hasher);
    hasher.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: i64) -> Timestamp {
        Timestamp::from_second(seconds).expect("a small number")
    }

    fn event(reason: &str, message: &str) -> RecordedEvent {
        let about = InvolvedObject::of_pod(
            &berth_types::PodRef { uid: "u".into(), name: "p".into(), namespace: "n".into() },
            None,
        );
        RecordedEvent { about, warning: true, reason: reason.into(), message: message.into(), annotations: Vec::new() }
    }

    fn take(correlator: &mut Correlator, event: RecordedEvent, second: i64) -> Option<(bool, String, i32, String)> {
        let sent = correlator.take(event, at(second), || "random".to_owned())?;
        let (first, series) = match sent {
            Send::First(series) => (true, series),
            Send::Again(series) => (false, series),
        };
        Some((first, series.message, series.count, series.name))
    }

    #[test]
    fn the_same_again_counts_up() {
        // AC-10-33
        let mut all = Correlator::default();
        let name = format!("p.{:x}", at(1).as_nanosecond());
        for (second, first, count) in [(1, true, 1), (2, false, 2), (3, false, 3)] {
            let taken = take(&mut all, event("BackOff", "m"), second);
            assert_eq!(taken, Some((first, "m".to_owned(), count, name.clone())));
        }
        let (first, _, _, other) = take(&mut all, event("BackOff", "other"), 1).expect("sent");
        assert!(first && other != name, "the same moment is another name");
        let mut on_container = event("BackOff", "m");
        on_container.about.field_path = Some("spec.containers{c}".to_owned());
        assert!(take(&mut all, on_container, 4).expect("sent").0, "another container is another series");
    }

    #[test]
    fn similar_events_become_one() {
        // AC-05-35
        let mut all = Correlator::default();
        let taken: Vec<_> = (0..12).filter_map(|i| take(&mut all, event("Failed", &format!("m{i}")), i)).collect();
        for (i, (first, message, count, _)) in taken.iter().take(9).enumerate() {
            assert_eq!((*first, message, *count), (true, &format!("m{i}"), 1));
        }
        let combined: Vec<_> =
            taken.iter().skip(9).map(|(first, message, count, _)| (*first, message.as_str(), *count)).collect();
        assert_eq!(
            combined,
            [
                (true, "(combined from similar events): m9", 1),
                (false, "(combined from similar events): m10", 2),
                (false, "(combined from similar events): m11", 3)
            ]
        );
        assert!(taken[9].3 == taken[11].3 && taken[9].3 != taken[0].3, "a name of its own");
        let later = take(&mut all, event("Failed", "m12"), 700).expect("sent");
        assert_eq!((later.0, later.1.as_str()), (true, "m12"), "ten minutes later events are no longer combined");
    }

    #[test]
    fn too_many_are_cut_off() {
        // AC-05-34
        let mut all = Correlator::default();
        let counts: Vec<Option<i32>> =
            (0..26).map(|i| take(&mut all, event("BackOff", "m"), i).map(|(_, _, count, _)| count)).collect();
        assert_eq!((counts[24], counts[25]), (Some(25), None));
        for (case, warning, reason, passes) in [
            ("normal", false, "SandboxChanged", true),
            ("life", false, "Started", true),
            ("warning", true, "Other", false),
        ] {
            let other = RecordedEvent { warning, ..event(reason, "m") };
            assert_eq!(take(&mut all, other, 30).is_some(), passes, "{case}");
        }
        let back = take(&mut all, event("BackOff", "m"), 26 + 300).expect("a token");
        assert_eq!((back.0, back.2), (false, 27), "what was cut off was counted");
        assert_eq!(take(&mut all, event("BackOff", "m"), 26 + 301), None);
    }

    #[test]
    fn a_clock_that_is_set_back_changes_neither_names_nor_limits() {
        let mut all = Correlator::default();
        let (late, early) = (1_000_000, 10);
        let counts = |all: &mut Correlator, second: i64, times: usize| {
            (0..times)
                .filter_map(|_| take(all, event("BackOff", "m"), second))
                .map(|taken| taken.2)
                .collect::<Vec<i32>>()
        };
        assert_eq!(counts(&mut all, late, 20).last(), Some(&20));
        assert_eq!(
            counts(&mut all, early, 20),
            [21, 22, 23, 24, 25],
            "one series; nothing was refilled, nothing taken"
        );
        assert_eq!(counts(&mut all, early + 299, 1), [0; 0]);
        assert_eq!(counts(&mut all, early + 301, 1).len(), 1, "by the new time one more may be sent");
        let name = |all: &mut Correlator, second: i64, uid: &str| {
            let mut other = event("BackOff", "m");
            other.about.uid = uid.to_owned();
            take(all, other, second).expect("sent").3
        };
        let names = [name(&mut all, late, "a"), name(&mut all, early, "b"), name(&mut all, late, "c")];
        assert!(names[0] != names[1] && names[1] != names[2] && names[0] != names[2], "{names:?}");
        // Similar events are still aggregated, and are separate again ten minutes later.
        let mut all = Correlator::default();
        let similar = |all: &mut Correlator, message: &str, second: i64| {
            take(all, event("Failed", message), second).expect("sent").1
        };
        (0..9).for_each(|i| drop(similar(&mut all, &format!("m{i}"), late)));
        assert_eq!(similar(&mut all, "m9", early), "(combined from similar events): m9");
        assert_eq!(similar(&mut all, "m10", early + 601), "m10");
    }

    #[test]
    fn names_that_are_none_are_random() {
        let mut all = Correlator::default();
        let mut odd = event("r", "m");
        odd.about.name = "Not_A_Name".to_owned();
        assert_eq!(take(&mut all, odd, 1).expect("sent").3, "random");
    }

    #[test]
    fn memory_is_bounded() {
        let mut all = Correlator::default();
        for i in 0..5000 {
            let mut one = event("r", "m");
            one.about.uid = format!("u{i}");
            take(&mut all, one, 1);
        }
        assert_eq!((all.similar.len(), all.counted.len(), all.buckets.len()), (4096, 4096, 4096));
    }
}
