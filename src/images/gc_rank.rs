//! Image garbage collection policy: thresholds, candidates, and their order (spec 03b §4). Pure.

use std::time::Duration;

use jiff::Timestamp;

/// State of one image.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ImageUse {
    /// The runtime's ID.
    pub id: String,
    /// When the image was first detected.
    pub first_detected: Timestamp,
    /// When the image was last used; `None` for never.
    pub last_used: Option<Timestamp>,
    /// Size in bytes.
    pub size: u64,
    /// Whether the runtime pins the image.
    pub pinned: bool,
    /// Whether a container refers to the image, or it was recently provided to a pod.
    pub in_use: bool,
}

impl ImageUse {
    /// When the image was last used, or first detected if it was never used.
    fn idle_since(&self) -> Timestamp {
        self.last_used.unwrap_or(self.first_detected).max(self.first_detected)
    }
}

/// Settings of image garbage collection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct GcPolicy {
    /// `imageGCHighThresholdPercent`, 0..=100; 100 disables the space pass.
    pub high_percent: u32,
    /// `imageGCLowThresholdPercent`, below the high threshold.
    pub low_percent: u32,
    /// `imageMinimumGCAge`.
    pub minimum_age: Duration,
    /// `imageMaximumGCAge`; zero disables the age pass.
    pub maximum_age: Duration,
}

impl Default for GcPolicy {
    fn default() -> Self {
        Self { high_percent: 85, low_percent: 80, minimum_age: Duration::from_secs(120), maximum_age: Duration::ZERO }
    }
}

impl GcPolicy {
    /// Whether both passes are disabled.
    pub fn is_off(&self) -> bool {
        self.high_percent >= 100 && self.maximum_age.is_zero()
    }
}

/// Disk space of the image filesystem, in bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DiskSpace {
    /// Total bytes.
    pub capacity: u64,
    /// Available bytes.
    pub available: u64,
}

/// Result of comparing disk usage with the thresholds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Demand {
    /// Usage is below the high threshold.
    Enough,
    /// The reported capacity is 0.
    InvalidCapacity,
    /// Bytes must be freed.
    Free {
        /// Bytes to free.
        bytes: u64,
        /// Disk usage in percent.
        percent: u64,
    },
}

/// Compares disk usage with the thresholds.
pub fn demand(policy: &GcPolicy, room: DiskSpace) -> Demand {
    if room.capacity == 0 {
        return Demand::InvalidCapacity;
    }
    let (capacity, available) = (u128::from(room.capacity), u128::from(room.available.min(room.capacity)));
    let percent = 100 - available * 100 / capacity;
    if policy.high_percent >= 100 || percent < u128::from(policy.high_percent) {
        return Demand::Enough;
    }
    let target = capacity * u128::from(100u32.saturating_sub(policy.low_percent)) / 100;
    let bytes = u64::try_from(target.saturating_sub(available)).unwrap_or(u64::MAX);
    Demand::Free { bytes, percent: u64::try_from(percent).unwrap_or(100) }
}

/// Minimum time to reach the high threshold at the write speed of fast disks, clamped to 0.5 to 10 s.
pub fn unreachable_for(policy: &GcPolicy, room: DiskSpace) -> Duration {
    const FASTEST: u64 = 2 << 30; // bytes per second
    const BETWEEN: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(10));
    let mark = u128::from(room.capacity) * u128::from(100u32.saturating_sub(policy.high_percent)) / 100;
    let left = room.available.saturating_sub(u64::try_from(mark).unwrap_or(u64::MAX));
    Duration::from_millis(left.saturating_mul(1000) / FASTEST).clamp(BETWEEN.0, BETWEEN.1)
}

/// Removal candidates, longest unused first: neither in use nor pinned.
pub fn candidates(images: &[ImageUse]) -> Vec<&ImageUse> {
    let mut list: Vec<&ImageUse> = images.iter().filter(|i| !i.in_use && !i.pinned).collect();
    list.sort_by(|a, b| (a.idle_since(), a.first_detected, &a.id).cmp(&(b.idle_since(), b.first_detected, &b.id)));
    list
}

/// Images unused for longer than the maximum age.
pub fn too_old<'a>(images: &'a [ImageUse], policy: &GcPolicy, now: Timestamp) -> Vec<&'a ImageUse> {
    if policy.maximum_age.is_zero() {
        return Vec::new();
    }
    candidates(images).into_iter().filter(|i| older_than(i.idle_since(), policy.maximum_age, now)).collect()
}

/// Images that the space pass may remove, in order: unused since before it began, and detected at least
/// the minimum age ago.
pub fn removable<'a>(images: &'a [ImageUse], policy: &GcPolicy, began: Timestamp) -> Vec<&'a ImageUse> {
    let idle = |i: &&ImageUse| i.last_used.is_none_or(|used| used < began);
    let known =
        |i: &&ImageUse| policy.minimum_age.is_zero() || !younger_than(i.first_detected, policy.minimum_age, began);
    candidates(images).into_iter().filter(idle).filter(known).collect()
}

fn age(since: Timestamp, now: Timestamp) -> Duration {
    Duration::try_from(now.duration_since(since)).unwrap_or(Duration::ZERO)
}

fn older_than(since: Timestamp, limit: Duration, now: Timestamp) -> bool {
    age(since, now) > limit
}

fn younger_than(since: Timestamp, limit: Duration, now: Timestamp) -> bool {
    age(since, now) < limit
}

/// Formats bytes with one decimal of the largest fitting unit.
pub fn human(bytes: u64) -> String {
    const UNITS: [(&str, u64); 4] = [("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)];
    match UNITS.iter().find(|(_, unit)| bytes >= *unit) {
        None => format!("{bytes} B"),
        #[allow(clippy::cast_precision_loss, reason = "one decimal is shown")]
        Some((name, unit)) => format!("{:.1} {name}", bytes as f64 / *unit as f64),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checks_are_more_frequent_near_the_threshold() {
        let room = |available| DiskSpace { capacity: 1000 << 30, available };
        for (available, expected) in
            [(1000 << 30, 10_000), (158 << 30, 4000), (150 << 30, 500), (0, 500), (u64::MAX, 10_000)]
        {
            let pause = unreachable_for(&GcPolicy::default(), room(available));
            assert_eq!(pause, Duration::from_millis(expected), "{available}");
        }
    }

    const NOW: i64 = 100_000;

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).expect("in range")
    }

    /// An image first detected and last used that many seconds ago.
    fn image(id: &str, seen: i64, used: Option<i64>) -> ImageUse {
        ImageUse {
            id: id.to_owned(),
            first_detected: at(NOW - seen),
            last_used: used.map(|u| at(NOW - u)),
            size: 8,
            pinned: false,
            in_use: false,
        }
    }

    fn ids(list: Vec<&ImageUse>) -> Vec<&str> {
        list.into_iter().map(|i| i.id.as_str()).collect()
    }

    #[test]
    fn how_much_must_go() {
        let policy = GcPolicy::default();
        let room = |available| DiskSpace { capacity: 1000, available };
        // AC-03b-20: 90 % in use, down to 80 %
        assert_eq!(demand(&policy, room(100)), Demand::Free { bytes: 100, percent: 90 });
        assert_eq!(demand(&policy, room(150)), Demand::Free { bytes: 50, percent: 85 });
        assert_eq!(demand(&policy, room(151)), Demand::Free { bytes: 49, percent: 85 });
        assert_eq!(demand(&policy, room(160)), Demand::Enough);
        assert_eq!(demand(&policy, room(5000)), Demand::Enough, "clamped");
        assert_eq!(demand(&policy, DiskSpace { capacity: 0, available: 0 }), Demand::InvalidCapacity);
        assert_eq!(demand(&GcPolicy { high_percent: 100, ..policy }, room(0)), Demand::Enough, "100 is off");
        assert_eq!(
            demand(&policy, DiskSpace { capacity: u64::MAX, available: 0 }).to_owned(),
            Demand::Free { bytes: u64::MAX / 5, percent: 100 }
        );
    }

    #[test]
    fn oldest_first_and_never_what_is_needed() {
        let busy = ImageUse { in_use: true, ..image("busy", 900, Some(900)) }; // AC-03b-21
        let pinned = ImageUse { pinned: true, ..image("pinned", 900, None) }; // AC-03b-22
        let images = [busy, image("b", 500, Some(300)), image("never", 400, None), image("a", 600, Some(300)), pinned];
        assert_eq!(ids(candidates(&images)), ["never", "a", "b"]);
        let policy = GcPolicy { maximum_age: Duration::from_secs(350), ..GcPolicy::default() };
        assert_eq!(ids(too_old(&images, &policy, at(NOW))), ["never"]);
        assert!(too_old(&images, &GcPolicy::default(), at(NOW)).is_empty());
    }

    #[test]
    fn the_young_stay() {
        // AC-03b-20: one old, one young; used at the moment the pass begins counts as in use
        let images = [image("young", 119, None), image("old", 120, None), image("now", 500, Some(0))];
        assert_eq!(ids(removable(&images, &GcPolicy::default(), at(NOW))), ["old"]);
    }

    #[test]
    fn sizes_for_people() {
        for (bytes, text) in
            [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (10 << 30, "10.0 GiB"), (3 << 39, "1.5 TiB")]
        {
            assert_eq!(human(bytes), text);
        }
    }
}
