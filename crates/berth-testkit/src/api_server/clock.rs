//! Adjustable clock and seeded random numbers of the test API server.
//!
//! Implements spec 10a §1.

use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};

use jiff::{SignedDuration, Timestamp};
use tokio::time::Instant;

/// Wall time at the start + elapsed time of tokio's clock + adjustments.
#[derive(Debug)]
pub struct Clock {
    wall: Timestamp,
    start: Instant,
    set: AtomicI64,
}

impl Default for Clock {
    /// Starts at the real time.
    fn default() -> Self {
        Self { wall: Timestamp::now(), start: Instant::now(), set: AtomicI64::new(0) }
    }
}

impl Clock {
    /// The current time of the server.
    pub fn now(&self) -> Timestamp {
        let elapsed = SignedDuration::try_from(self.start.elapsed()).expect("tests do not run for long");
        let set = SignedDuration::from_millis(self.set.load(Ordering::Relaxed));
        self.wall + elapsed + set
    }

    /// Adjusts the clock, forward or back.
    pub fn jump(&self, by: SignedDuration) {
        let by = i64::try_from(by.as_millis()).expect("within millions of years");
        self.set.fetch_add(by, Ordering::Relaxed);
    }
}

/// Timestamp as in objects: RFC 3339, whole seconds, UTC.
pub fn text(at: Timestamp) -> String {
    at.strftime("%Y-%m-%dT%H:%M:%SZ").to_string()
}

/// Random numbers from a seed (splitmix64).
#[derive(Debug)]
pub struct Chance(AtomicU64);

/// Alphabet of the random suffixes of generated names.
const LETTERS: &[u8] = b"bcdfghjklmnpqrstvwxz2456789";

impl Chance {
    /// A sequence that depends on `seed` only.
    pub fn new(seed: u64) -> Self {
        Self(AtomicU64::new(seed))
    }

    /// The next number of the sequence.
    pub fn next(&self) -> u64 {
        let step = 0x9E37_79B9_7F4A_7C15_u64;
        let mut z = self.0.fetch_add(step, Ordering::Relaxed).wrapping_add(step);
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }
}

/// Five random characters that follow a `generateName`.
pub fn suffix(mut random: u64) -> String {
    let count = LETTERS.len() as u64;
    let mut letter = || {
        let at = usize::try_from(random % count).expect("small");
        random /= count;
        char::from(LETTERS[at])
    };
    (0..5).map(|_| letter()).collect()
}

/// Version 4 UUID from two random numbers.
pub fn uuid(high: u64, low: u64) -> String {
    let (high, low) = ((high & !0xF000) | 0x4000, (low & !(0b11 << 62)) | (0b10 << 62));
    let hex = format!("{high:016x}{low:016x}");
    format!("{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..])
}
