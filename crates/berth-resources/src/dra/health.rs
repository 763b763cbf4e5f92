//! Health of DRA devices, as drivers report it. Pure. Spec 06c §3.6.
//!
//! The table contains what drivers have reported within the timeout of each device. A device that is not in the table
//! is Unknown. The state file `dra_health_state` is compatible with the reference.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use jiff::Timestamp;
use serde_json::{Map, Value, json};

use crate::go_json::{Decoded, decode_field, decode_integer, decode_members, decode_string, parse, to_text};

/// Timeout of devices whose driver reports none.
pub const DEFAULT_HEALTH_TIMEOUT: Duration = Duration::from_secs(30);

/// Largest timeout, 292 years: what the state file can represent.
const MAX_TIMEOUT: Duration = Duration::from_nanos(i64::MAX.unsigned_abs());
/// Maximum number of devices of a driver.
const MAX_DEVICES: usize = 4096;
/// Maximum length of a message in bytes.
const MAX_MESSAGE: usize = 1024;
/// Ends a message that was cut.
const ELLIPSIS: &str = "...";

/// Pool and name of a device of one driver.
pub type PoolDevice = (String, String);

/// Health of a device, with the names that the state file and the pod status use.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum DeviceHealth {
    /// No report, an old report, or a report of unknown health.
    #[default]
    Unknown,
    /// Works, according to its driver.
    Healthy,
    /// Does not work, according to its driver.
    Unhealthy,
}

impl DeviceHealth {
    /// `Unknown`, `Healthy`, or `Unhealthy`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Unknown => "Unknown",
            Self::Healthy => "Healthy",
            Self::Unhealthy => "Unhealthy",
        }
    }

    fn from_name(name: &str) -> Self {
        [Self::Healthy, Self::Unhealthy].into_iter().find(|health| health.as_str() == name).unwrap_or_default()
    }
}

/// A device in a message of its driver.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct DeviceReport {
    /// Pool of the device.
    pub pool: String,
    /// Name of the device in its pool.
    pub device: String,
    /// Health that the driver reports.
    pub health: DeviceHealth,
    /// How long the report is valid; zero means [`DEFAULT_HEALTH_TIMEOUT`].
    pub timeout: Duration,
    /// Explanation for people; may be empty.
    pub message: String,
}

/// Effect of a driver's message.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct HealthUpdate {
    /// Devices whose health, message, or timeout is another one.
    pub changed: BTreeSet<PoolDevice>,
    /// Number of reports that were ignored because the driver has too many devices (4096).
    pub ignored: usize,
}

/// Reason for which the state file cannot be used. The agent starts with an empty table then.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("cannot be decoded: {0}")]
pub struct HealthStateError(String);

/// Health of the devices of all drivers.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct HealthTable {
    drivers: BTreeMap<String, DriverDevices>,
}

type DriverDevices = BTreeMap<PoolDevice, HealthEntry>;

/// The last report of a device.
#[derive(Clone, PartialEq, Eq, Debug)]
struct HealthEntry {
    health: DeviceHealth,
    /// When this agent received the report. Wall clock, because it outlives the agent in the state file.
    updated_at: Timestamp,
    timeout: Duration,
    message: String,
}

impl HealthTable {
    /// Applies a message of a driver: replaces the devices that it lists, and removes expired ones.
    pub fn update(&mut self, driver: &str, reports: Vec<DeviceReport>, now: Timestamp) -> HealthUpdate {
        let devices = self.drivers.entry(driver.to_owned()).or_default();
        let mut update = HealthUpdate { changed: remove_expired(devices, now), ignored: 0 };
        for report in reports {
            let entry = HealthEntry::new(report.health, now, report.timeout, report.message);
            let key = (report.pool, report.device);
            let previous = devices.get(&key);
            if previous.is_none() && devices.len() >= MAX_DEVICES {
                update.ignored += 1;
                continue;
            }
            if previous.is_none_or(|previous| entry.differs_from(previous)) {
                update.changed.insert(key.clone());
            }
            devices.insert(key, entry);
        }
        update
    }

    /// Returns health and message of a device. Unknown without a message if the last report is older than its timeout.
    pub fn get(&self, driver: &str, pool: &str, device: &str, now: Timestamp) -> (DeviceHealth, Option<&str>) {
        let key = (pool.to_owned(), device.to_owned());
        match self.drivers.get(driver).and_then(|devices| devices.get(&key)) {
            Some(entry) if !entry.is_expired(now) => {
                (entry.health, Some(entry.message.as_str()).filter(|text| !text.is_empty()))
            }
            _ => (DeviceHealth::Unknown, None),
        }
    }

    /// Removes all devices of a driver, whose health stream has ended. Returns those that become Unknown.
    pub fn drop_driver(&mut self, driver: &str) -> BTreeSet<PoolDevice> {
        let devices = self.drivers.remove(driver).unwrap_or_default();
        devices.into_iter().filter(|(_, entry)| entry.is_visible()).map(|(key, _)| key).collect()
    }

    /// Time until [`HealthTable::expire`] removes the next device; zero if one has expired, `None` without devices.
    pub fn next_expiry(&self, now: Timestamp) -> Option<Duration> {
        self.drivers.values().flat_map(BTreeMap::values).map(|entry| entry.remaining(now)).min()
    }

    /// Removes devices whose last report is older than its timeout. Returns those that become Unknown, by driver.
    pub fn expire(&mut self, now: Timestamp) -> BTreeMap<String, BTreeSet<PoolDevice>> {
        let drivers = self.drivers.iter_mut();
        let changed = drivers.map(|(driver, devices)| (driver.clone(), remove_expired(devices, now)));
        changed.filter(|(_, devices)| !devices.is_empty()).collect()
    }

    /// Encodes the table as a state file, without a trailing newline.
    pub fn encode(&self) -> Vec<u8> {
        let drivers: Map<String, Value> = self
            .drivers
            .iter()
            .map(|(driver, devices)| {
                // Go sorts the joined keys, which is another order than that of pool and device.
                let devices: BTreeMap<String, Value> =
                    devices.iter().map(|(key, entry)| (format!("{}/{}", key.0, key.1), entry.to_json(key))).collect();
                (driver.clone(), json!({ "Devices": devices }))
            })
            .collect();
        to_text(&Value::Object(drivers)).into_bytes()
    }

    /// Decodes a state file. Unknown fields are ignored, and field names match without regard to case.
    ///
    /// # Errors
    /// The content is not JSON of this format.
    pub fn decode(content: &[u8]) -> Result<Self, HealthStateError> {
        let driver = |name: &str, state: &Value| -> Decoded<(String, DriverDevices)> {
            let devices = decode_field(state, "Devices", |devices| {
                decode_members(devices, |_, device| HealthEntry::from_json(device))
            })?;
            Ok((name.to_owned(), devices.into_iter().take(MAX_DEVICES).collect()))
        };
        let drivers = parse(content).and_then(|file| decode_members(&file, driver)).map_err(HealthStateError)?;
        Ok(Self { drivers: drivers.into_iter().collect() })
    }
}

/// Removes expired devices; absent ones are Unknown. Returns those whose health or message was another one.
fn remove_expired(devices: &mut DriverDevices, now: Timestamp) -> BTreeSet<PoolDevice> {
    let mut changed = BTreeSet::new();
    devices.retain(|key, entry| {
        // After the clock was set back, the report would be valid until the clock has caught up.
        entry.updated_at = entry.updated_at.min(now);
        let is_expired = entry.is_expired(now);
        if is_expired && entry.is_visible() {
            changed.insert(key.clone());
        }
        !is_expired
    });
    changed
}

impl HealthEntry {
    fn new(health: DeviceHealth, updated_at: Timestamp, timeout: Duration, message: String) -> Self {
        let timeout = if timeout.is_zero() { DEFAULT_HEALTH_TIMEOUT } else { timeout.min(MAX_TIMEOUT) };
        Self { health, updated_at, timeout, message: cut_message(message) }
    }

    fn differs_from(&self, other: &Self) -> bool {
        (self.health, self.timeout, &self.message) != (other.health, other.timeout, &other.message)
    }

    /// Whether the device differs from one without an entry.
    fn is_visible(&self) -> bool {
        self.health != DeviceHealth::Unknown || !self.message.is_empty()
    }

    fn is_expired(&self, now: Timestamp) -> bool {
        self.age(now) > self.timeout
    }

    /// Time until the entry has expired: one nanosecond after its timeout.
    fn remaining(&self, now: Timestamp) -> Duration {
        (self.timeout + Duration::from_nanos(1)).saturating_sub(self.age(now))
    }

    /// Zero for a report of the future.
    fn age(&self, now: Timestamp) -> Duration {
        Duration::try_from(now.duration_since(self.updated_at)).unwrap_or_default()
    }

    fn to_json(&self, key: &PoolDevice) -> Value {
        json!({
            "PoolName": key.0,
            "DeviceName": key.1,
            "Health": self.health.as_str(),
            "LastUpdated": self.updated_at.to_string(),
            "HealthCheckTimeout": i64::try_from(self.timeout.as_nanos()).unwrap_or(i64::MAX),
            "Message": self.message,
        })
    }

    fn from_json(value: &Value) -> Decoded<(PoolDevice, Self)> {
        let key = (decode_field(value, "PoolName", decode_string)?, decode_field(value, "DeviceName", decode_string)?);
        let health = decode_field(value, "Health", decode_string)?;
        let timeout = decode_field(value, "HealthCheckTimeout", decode_integer)?;
        let entry = Self::new(
            DeviceHealth::from_name(&health),
            decode_field(value, "LastUpdated", decode_time)?,
            u64::try_from(timeout).map(Duration::from_nanos).unwrap_or_default(),
            decode_field(value, "Message", decode_string)?,
        );
        Ok((key, entry))
    }
}

/// Cuts a message to 1024 bytes on a character boundary.
fn cut_message(mut message: String) -> String {
    if message.len() > MAX_MESSAGE {
        let end = (0..=MAX_MESSAGE - ELLIPSIS.len()).rev().find(|at| message.is_char_boundary(*at)).unwrap_or(0);
        message.truncate(end);
        message.push_str(ELLIPSIS);
    }
    message
}

/// Decodes a time of RFC 3339 with any offset; null is a time long ago.
fn decode_time(value: &Value) -> Decoded<Timestamp> {
    match decode_string(value)?.as_str() {
        "" => Ok(Timestamp::UNIX_EPOCH),
        text => text.parse::<Timestamp>().map_err(|error| format!("{text:?} is not a time: {error}")),
    }
}

#[cfg(test)]
mod tests {
    use DeviceHealth::{Healthy, Unhealthy, Unknown};
    use proptest::{collection, prelude::*};

    use super::*;

    const DRIVER: &str = "gpu.example.com";

    fn at(second: i64) -> Timestamp {
        Timestamp::new(1_700_000_000 + second, 0).expect("in range")
    }

    /// A nanosecond later.
    fn just_after(second: i64) -> Timestamp {
        Timestamp::new(1_700_000_000 + second, 1).expect("in range")
    }

    /// Report of a device in the pool `node1`; the timeout is in seconds.
    fn report(device: &str, health: DeviceHealth, timeout: u64, message: &str) -> DeviceReport {
        DeviceReport {
            pool: "node1".to_owned(),
            device: device.to_owned(),
            health,
            timeout: Duration::from_secs(timeout),
            message: message.to_owned(),
        }
    }

    fn keys(devices: &[&str]) -> BTreeSet<PoolDevice> {
        devices.iter().map(|device| ("node1".to_owned(), (*device).to_owned())).collect()
    }

    fn table(reports: &[DeviceReport]) -> HealthTable {
        let mut table = HealthTable::default();
        table.update(DRIVER, reports.to_vec(), at(0));
        table
    }

    #[track_caller]
    fn check(table: &HealthTable, device: &str, now: Timestamp, expected: (DeviceHealth, Option<&str>)) {
        assert_eq!(table.get(DRIVER, "node1", device, now), expected);
    }

    #[test]
    fn reports_are_valid_until_their_timeout() {
        // AC-06c-25
        let unhealthy = table(&[report("a", Unhealthy, 0, "xid 79")]);
        check(&unhealthy, "a", at(0), (Unhealthy, Some("xid 79")));
        check(&unhealthy, "a", at(30), (Unhealthy, Some("xid 79")));
        // AC-06c-26
        check(&unhealthy, "a", just_after(30), (Unknown, None));
        check(&unhealthy, "a", at(31), (Unknown, None));

        let healthy = table(&[report("a", Healthy, 60, "")]);
        check(&healthy, "a", at(60), (Healthy, None));
        check(&healthy, "a", at(61), (Unknown, None));
        check(&table(&[report("a", Healthy, u64::MAX, "")]), "a", at(1_000_000_000), (Healthy, None));
        check(&table(&[report("a", Unknown, 0, "starting")]), "a", at(1), (Unknown, Some("starting")));
        // A clock that was set back.
        check(&healthy, "a", at(-5), (Healthy, None));

        for (driver, pool, device) in [("x", "node1", "a"), (DRIVER, "x", "a"), (DRIVER, "node1", "x")] {
            assert_eq!(healthy.get(driver, pool, device, at(0)), (Unknown, None), "{driver} {pool} {device}");
        }
    }

    #[test]
    fn messages_replace_the_devices_that_they_list() {
        let before = [report("a", Healthy, 0, ""), report("b", Unhealthy, 10, "xid 79")];
        for (now, reports, changed) in [
            (1, vec![report("a", Healthy, 0, "")], keys(&[])),
            (1, vec![report("a", Healthy, 30, "")], keys(&[])),
            (1, vec![], keys(&[])),
            (1, vec![report("a", Unhealthy, 0, "")], keys(&["a"])),
            (1, vec![report("a", Healthy, 0, "x")], keys(&["a"])),
            (1, vec![report("a", Healthy, 31, "")], keys(&["a"])),
            (1, vec![report("c", Healthy, 0, "")], keys(&["c"])),
            // Devices that the message does not list become Unknown once they are too old.
            (10, vec![report("a", Healthy, 0, "")], keys(&[])),
            (11, vec![report("a", Healthy, 0, "")], keys(&["b"])),
            (31, vec![], keys(&["a", "b"])),
            // Since the last report, the device was Unknown.
            (31, vec![report("a", Healthy, 0, "")], keys(&["a", "b"])),
        ] {
            let mut table = table(&before);
            let update = table.update(DRIVER, reports.clone(), at(now));
            assert_eq!(update, HealthUpdate { changed, ignored: 0 }, "{now} {reports:?}");
            for report in reports {
                let message = Some(report.message.as_str()).filter(|text| !text.is_empty());
                check(&table, &report.device, at(now), (report.health, message));
            }
        }
    }

    #[test]
    fn later_messages_extend_the_validity() {
        let mut table = table(&[report("a", Healthy, 0, "")]);
        assert_eq!(table.update(DRIVER, vec![report("a", Healthy, 0, "")], at(20)), HealthUpdate::default());
        check(&table, "a", at(50), (Healthy, None));
        check(&table, "a", at(51), (Unknown, None));
    }

    #[test]
    fn devices_expire_without_a_message() {
        let mut table =
            table(&[report("a", Healthy, 10, ""), report("b", Unhealthy, 20, ""), report("c", Unknown, 5, "")]);
        table.update("other", vec![report("a", Healthy, 10, "")], at(0));
        for (now, changed) in [
            (at(5), BTreeMap::new()),
            // What was Unknown before does not change.
            (just_after(5), BTreeMap::new()),
            (at(10), BTreeMap::new()),
            (just_after(10), BTreeMap::from([(DRIVER.to_owned(), keys(&["a"])), ("other".to_owned(), keys(&["a"]))])),
            (just_after(10), BTreeMap::new()),
            (at(100), BTreeMap::from([(DRIVER.to_owned(), keys(&["b"]))])),
        ] {
            assert_eq!(table.expire(now), changed, "{now}");
        }
        assert_eq!(table.next_expiry(at(100)), None);
    }

    #[test]
    fn the_timer_runs_until_the_first_device_has_expired() {
        let mut table = table(&[report("a", Healthy, 10, ""), report("b", Healthy, 0, "")]);
        let nanosecond = Duration::from_nanos(1);
        for (now, expected) in [
            (at(0), Duration::from_secs(10) + nanosecond),
            (at(10), nanosecond),
            (just_after(10), Duration::ZERO),
            (at(20), Duration::ZERO),
            (at(-10), Duration::from_secs(10) + nanosecond),
        ] {
            assert_eq!(table.next_expiry(now), Some(expected), "{now}");
        }
        table.expire(just_after(10));
        assert_eq!(table.next_expiry(at(11)), Some(Duration::from_secs(19) + nanosecond));
        assert_eq!(HealthTable::default().next_expiry(at(0)), None);
    }

    #[test]
    fn a_clock_that_was_set_back_does_not_extend_the_validity() {
        let mut table = table(&[report("a", Healthy, 0, "")]);
        assert_eq!(table.expire(at(-3600)), BTreeMap::new());
        assert_eq!(table.expire(at(-3569)), BTreeMap::from([(DRIVER.to_owned(), keys(&["a"]))]));
    }

    #[test]
    fn the_devices_of_a_driver_become_unknown_when_its_stream_ends() {
        let mut table =
            table(&[report("a", Healthy, 0, ""), report("b", Unknown, 0, ""), report("c", Unknown, 0, "x")]);
        table.update("other", vec![report("a", Healthy, 0, "")], at(0));
        assert_eq!(table.drop_driver(DRIVER), keys(&["a", "c"]));
        check(&table, "a", at(0), (Unknown, None));
        assert_eq!(table.get("other", "node1", "a", at(0)), (Healthy, None));
        assert_eq!(table.drop_driver(DRIVER), keys(&[]));
    }

    #[test]
    fn the_number_of_devices_is_limited() {
        let names: Vec<String> = (0..MAX_DEVICES + 2).map(|number| format!("d{number}")).collect();
        let reports: Vec<DeviceReport> = names.iter().map(|name| report(name, Healthy, 0, "")).collect();
        let mut table = HealthTable::default();
        let update = table.update(DRIVER, reports, at(0));
        assert_eq!((update.changed.len(), update.ignored), (MAX_DEVICES, 2));
        check(&table, "d4095", at(0), (Healthy, None));
        check(&table, "d4096", at(0), (Unknown, None));
        // Known devices are still updated, other drivers have their own limit, and expired devices leave room.
        assert_eq!(table.update(DRIVER, vec![report("d0", Unhealthy, 60, "")], at(1)).changed, keys(&["d0"]));
        assert_eq!(table.update("other", vec![report("x", Healthy, 0, "")], at(1)).ignored, 0);
        assert_eq!(table.update(DRIVER, vec![report("x", Healthy, 0, "")], at(1)).ignored, 1);
        let update = table.update(DRIVER, vec![report("x", Healthy, 0, "")], at(31));
        assert_eq!((update.changed.len(), update.ignored), (MAX_DEVICES, 0));
    }

    #[test]
    fn long_messages_are_cut() {
        for (message, expected) in [
            ("a".repeat(1024), "a".repeat(1024)),
            ("a".repeat(1025), format!("{}...", "a".repeat(1021))),
            ("é".repeat(512), "é".repeat(512)),
            // Byte 1021 is within a character.
            ("é".repeat(513), format!("{}...", "é".repeat(510))),
            (format!("a{}", "é".repeat(512)), format!("a{}...", "é".repeat(510))),
            ("\u{1f600}".repeat(300), format!("{}...", "\u{1f600}".repeat(255))),
        ] {
            let table = table(&[report("a", Unhealthy, 0, &message)]);
            check(&table, "a", at(0), (Unhealthy, Some(&expected)));
        }
    }

    #[test]
    fn tables_are_encoded_as_the_reference_encodes_them() {
        let mut table = HealthTable::default();
        assert_eq!(table.encode(), b"{}");
        let pooled = |pool: &str| DeviceReport { pool: pool.to_owned(), ..report("d", Healthy, 60, "") };
        let now = Timestamp::new(1_700_000_000, 120_000_000).expect("in range");
        table.update("b", vec![pooled("p"), pooled("p-1")], now);
        table.update("a", vec![report("x", Unhealthy, 0, "<xid> & 79")], at(0));
        table.update("c", vec![], at(0));
        let text = concat!(
            r#"{"a":{"Devices":{"node1/x":{"PoolName":"node1","DeviceName":"x","Health":"Unhealthy","#,
            r#""LastUpdated":"2023-11-14T22:13:20Z","HealthCheckTimeout":30000000000,"#,
            r#""Message":"\u003cxid\u003e \u0026 79"}}},"#,
            r#""b":{"Devices":{"p-1/d":{"PoolName":"p-1","DeviceName":"d","Health":"Healthy","#,
            r#""LastUpdated":"2023-11-14T22:13:20.12Z","HealthCheckTimeout":60000000000,"Message":""},"#,
            r#""p/d":{"PoolName":"p","DeviceName":"d","Health":"Healthy","#,
            r#""LastUpdated":"2023-11-14T22:13:20.12Z","HealthCheckTimeout":60000000000,"Message":""}}},"#,
            r#""c":{"Devices":{}}}"#,
        );
        assert_eq!(String::from_utf8(table.encode()).expect("UTF-8"), text);
        assert_eq!(HealthTable::decode(text.as_bytes()), Ok(table));
    }

    #[test]
    fn state_files_of_other_writers_are_accepted() {
        let file = |device: &str| format!(r#"{{"{DRIVER}":{{"Devices":{{"node1/a":{device}}}}}}}"#);
        let names = r#""PoolName":"node1","DeviceName":"a""#;
        for (device, expected) in [
            // Local time of the writer, and an older version without timeout and message.
            (format!(r#"{{{names},"Health":"Healthy","LastUpdated":"2023-11-14T23:13:20+01:00"}}"#), (Healthy, None)),
            (
                format!(r#"{{{names},"health":"Unhealthy","LASTUPDATED":"2023-11-14T22:13:20Z","Message":"m","X":1}}"#),
                (Unhealthy, Some("m")),
            ),
            (
                format!(
                    r#"{{{names},"Health":"Healthy","LastUpdated":"2023-11-14T22:13:20Z","HealthCheckTimeout":-1}}"#
                ),
                (Healthy, None),
            ),
            (format!(r#"{{{names},"Health":"Odd","LastUpdated":"2023-11-14T22:13:20Z"}}"#), (Unknown, None)),
            (format!(r#"{{{names},"Health":"Healthy","LastUpdated":"0001-01-01T00:00:00Z"}}"#), (Unknown, None)),
            (format!(r#"{{{names},"Health":"Healthy"}}"#), (Unknown, None)),
            ("{}".to_owned(), (Unknown, None)),
            ("null".to_owned(), (Unknown, None)),
        ] {
            let table = HealthTable::decode(file(&device).as_bytes()).expect(&device);
            assert_eq!(table.get(DRIVER, "node1", "a", at(30)), expected, "{device}");
        }
        for text in ["null", "{}"] {
            assert_eq!(HealthTable::decode(text.as_bytes()), Ok(HealthTable::default()), "{text}");
        }
        for text in [r#"{"d":null}"#, r#"{"d":{"Devices":null}}"#, r#"{"d":{}}"#] {
            let table = HealthTable::decode(text.as_bytes()).expect(text);
            assert_eq!(table.next_expiry(at(0)), None, "{text}");
        }
    }

    #[test]
    fn other_formats_are_refused() {
        for (text, error) in [
            ("[7]", "expected an object"),
            (r#"{"d":7}"#, "expected an object"),
            (r#"{"d":{"Devices":[]}}"#, "Devices: expected an object"),
            (r#"{"d":{"Devices":{"p/d":{"Health":1}}}}"#, "Devices: Health: expected a string"),
            (
                r#"{"d":{"Devices":{"p/d":{"HealthCheckTimeout":1.5}}}}"#,
                "Devices: HealthCheckTimeout: expected an integer",
            ),
        ] {
            let found = HealthTable::decode(text.as_bytes()).expect_err("another format");
            assert_eq!(found.to_string(), format!("cannot be decoded: {error}"), "{text}");
        }
        for text in ["", "{", r#"{"d":{"Devices":{"p/d":{"LastUpdated":"today"}}}}"#] {
            assert!(HealthTable::decode(text.as_bytes()).is_err(), "{text}");
        }
    }

    fn any_report() -> impl Strategy<Value = DeviceReport> {
        let health = prop::sample::select(vec![Unknown, Healthy, Unhealthy]);
        let timeout = any::<u64>().prop_map(Duration::from_nanos);
        ("[a-b]{1,2}", "[a-c]{1,2}", health, timeout, "[<>&\"\\\\\u{2028}a-cé]{0,4}").prop_map(
            |(pool, device, health, timeout, message)| DeviceReport { pool, device, health, timeout, message },
        )
    }

    proptest! {
        #[test]
        fn decoding_reverses_encoding(
            reports in collection::vec(any_report(), 0..6),
            second in 0..4_000_000_000_i64,
            nanosecond in 0..1_000_000_000,
        ) {
            let mut table = HealthTable::default();
            table.update(DRIVER, reports, Timestamp::new(second, nanosecond).expect("in range"));
            prop_assert_eq!(HealthTable::decode(&table.encode()), Ok(table));
        }

        #[test]
        fn garbage_never_panics(
            garbage in collection::vec(any::<u8>(), 0..200),
            reports in collection::vec(any_report(), 1..6),
            at_byte in any::<prop::sample::Index>(),
            byte in any::<u8>(),
        ) {
            let mut content = table(&reports).encode();
            let changed = at_byte.index(content.len());
            content[changed] = byte;
            for content in [content, garbage] {
                if let Ok(mut table) = HealthTable::decode(&content) {
                    let _any = table.next_expiry(at(0));
                    let _any = table.expire(at(0));
                }
            }
        }

        #[test]
        fn the_timer_and_expiry_agree(reports in collection::vec(any_report(), 1..6), second in 0..1_000_000_000_i64) {
            let mut table = table(&reports);
            let is_due = table.next_expiry(at(second)) == Some(Duration::ZERO);
            let before = table.clone();
            table.expire(at(second));
            prop_assert_eq!(is_due, table != before);
        }
    }
}
