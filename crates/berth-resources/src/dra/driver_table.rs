//! Registered DRA drivers with their endpoints, and when a driver counts as gone. Without IO. Spec 06c §3.1.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    time::Duration,
};

use tokio::time::Instant;
use tokio_util::sync::DropGuard;

/// Maximum number of drivers, which bounds tasks and metric labels.
const MAX_DRIVERS: usize = 256;
/// Maximum number of endpoints of a driver.
const MAX_ENDPOINTS: usize = 8;
/// How long a driver may have no connected endpoint until it counts as gone.
const GONE_AFTER: Duration = Duration::from_secs(30);

/// Number of a registration; a later registration of the same endpoint has another one.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct RegistrationId(u64);

/// State of an endpoint's connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Link {
    /// Calls can be made.
    Connected,
    /// Calls fail until the endpoint is connected again.
    Disconnected,
}

/// Drivers by name, with a client of type `C` for each endpoint.
pub(super) struct DriverTable<C> {
    drivers: BTreeMap<String, DriverEntry<C>>,
    last_id: u64,
}

struct DriverEntry<C> {
    /// In the order of their registration.
    endpoints: Vec<EndpointEntry<C>>,
    presence: Presence,
}

struct EndpointEntry<C> {
    id: RegistrationId,
    socket: PathBuf,
    client: C,
    link: Link,
    /// Ends the task of the endpoint when the entry is removed.
    _task: DropGuard,
}

/// Whether a driver has a connected endpoint.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Presence {
    Connected,
    DisconnectedSince(Instant),
    /// Disconnected, and reported as gone.
    Gone,
}

impl<C> Default for DriverTable<C> {
    fn default() -> Self {
        Self { drivers: BTreeMap::new(), last_id: 0 }
    }
}

impl<C> DriverTable<C> {
    /// Adds an endpoint, the newest one of its driver. Dropping `task` ends the endpoint's task.
    ///
    /// # Errors
    /// The endpoint is already registered, or the limits of 256 drivers and 8 endpoints are reached.
    pub fn add(
        &mut self,
        driver: &str,
        socket: &Path,
        (client, link): (C, Link),
        task: DropGuard,
        now: Instant,
    ) -> Result<RegistrationId, String> {
        if !self.drivers.contains_key(driver) && self.drivers.len() >= MAX_DRIVERS {
            return Err(format!("at most {MAX_DRIVERS} DRA drivers can be registered"));
        }
        let known = self.drivers.get(driver).map(|entry| entry.endpoints.as_slice()).unwrap_or_default();
        if known.iter().any(|endpoint| endpoint.socket == socket) {
            let endpoint = socket.display();
            return Err(format!("endpoint {endpoint} already registered for DRA driver plugin {driver}"));
        }
        if known.len() >= MAX_ENDPOINTS {
            return Err(format!("at most {MAX_ENDPOINTS} endpoints can be registered for DRA driver plugin {driver}"));
        }
        self.last_id += 1;
        let id = RegistrationId(self.last_id);
        let empty = || DriverEntry { endpoints: Vec::new(), presence: Presence::DisconnectedSince(now) };
        let entry = self.drivers.entry(driver.to_owned()).or_insert_with(empty);
        entry.endpoints.push(EndpointEntry { id, socket: socket.to_owned(), client, link, _task: task });
        entry.update_presence(now);
        Ok(id)
    }

    /// Removes an endpoint. Returns whether it was registered.
    pub fn remove(&mut self, driver: &str, socket: &Path, now: Instant) -> bool {
        let Some(entry) = self.drivers.get_mut(driver) else { return false };
        let before = entry.endpoints.len();
        entry.endpoints.retain(|endpoint| endpoint.socket != socket);
        let is_removed = entry.endpoints.len() != before;
        entry.update_presence(now);
        if entry.endpoints.is_empty() && entry.presence == Presence::Gone {
            self.drivers.remove(driver);
        }
        is_removed
    }

    /// Replaces the client of an endpoint; does nothing if the registration was removed.
    pub fn update(&mut self, driver: &str, id: RegistrationId, (client, link): (C, Link), now: Instant) {
        self.change(driver, id, now, |endpoint| {
            endpoint.client = client;
            endpoint.link = link;
        });
    }

    /// Records that an endpoint's connection has ended.
    pub fn disconnect(&mut self, driver: &str, id: RegistrationId, now: Instant) {
        self.change(driver, id, now, |endpoint| endpoint.link = Link::Disconnected);
    }

    fn change(&mut self, driver: &str, id: RegistrationId, now: Instant, apply: impl FnOnce(&mut EndpointEntry<C>)) {
        let Some(entry) = self.drivers.get_mut(driver) else { return };
        if let Some(endpoint) = entry.endpoints.iter_mut().find(|endpoint| endpoint.id == id) {
            apply(endpoint);
            entry.update_presence(now);
        }
    }

    /// Client for calls: of the newest connected endpoint, else of the newest one.
    pub fn client(&self, driver: &str) -> Option<&C> {
        let endpoints = &self.drivers.get(driver)?.endpoints;
        let connected = endpoints.iter().rev().find(|endpoint| endpoint.link == Link::Connected);
        connected.or_else(|| endpoints.last()).map(|endpoint| &endpoint.client)
    }

    /// When [`DriverTable::take_gone`] returns the next driver.
    pub fn next_gone(&self) -> Option<Instant> {
        self.drivers.values().filter_map(|entry| entry.presence.gone_at()).min()
    }

    /// Drivers that have had no connected endpoint for 30 s; each is returned once until it is connected again.
    pub fn take_gone(&mut self, now: Instant) -> Vec<String> {
        let mut gone = Vec::new();
        for (driver, entry) in &mut self.drivers {
            if entry.presence.gone_at().is_some_and(|at| at <= now) {
                entry.presence = Presence::Gone;
                gone.push(driver.clone());
            }
        }
        self.drivers.retain(|_, entry| !entry.endpoints.is_empty() || entry.presence != Presence::Gone);
        gone
    }
}

impl<C> DriverEntry<C> {
    fn update_presence(&mut self, now: Instant) {
        let is_connected = self.endpoints.iter().any(|endpoint| endpoint.link == Link::Connected);
        self.presence = match (is_connected, self.presence) {
            (true, _) => Presence::Connected,
            (false, Presence::Connected) => Presence::DisconnectedSince(now),
            (false, before) => before,
        };
    }
}

impl Presence {
    fn gone_at(self) -> Option<Instant> {
        match self {
            Self::DisconnectedSince(since) => Some(since + GONE_AFTER),
            Self::Connected | Self::Gone => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio_util::sync::CancellationToken;

    use super::*;

    const UP: Link = Link::Connected;
    const DOWN: Link = Link::Disconnected;

    /// Table whose clients are names.
    struct Fixture {
        table: DriverTable<&'static str>,
        start: Instant,
    }

    impl Fixture {
        fn new() -> Self {
            Self { table: DriverTable::default(), start: Instant::now() }
        }

        fn at(&self, second: u64) -> Instant {
            self.start + Duration::from_secs(second)
        }

        /// Adds the endpoint `/<name>` with a client of that name.
        fn add(&mut self, driver: &str, name: &'static str, link: Link, second: u64) -> RegistrationId {
            let task = CancellationToken::new().drop_guard();
            let now = self.at(second);
            self.table.add(driver, &socket(name), (name, link), task, now).expect("added")
        }

        fn gone(&mut self, second: u64) -> Vec<String> {
            let now = self.at(second);
            self.table.take_gone(now)
        }
    }

    fn socket(name: &str) -> PathBuf {
        Path::new("/").join(name)
    }

    #[test]
    fn calls_use_the_newest_connected_endpoint() {
        let mut fixture = Fixture::new();
        assert_eq!(fixture.table.client("gpu"), None);
        let old = fixture.add("gpu", "old", DOWN, 0);
        assert_eq!(fixture.table.client("gpu"), Some(&"old"));
        let new = fixture.add("gpu", "new", DOWN, 0);
        assert_eq!(fixture.table.client("gpu"), Some(&"new"));
        let now = fixture.at(1);
        fixture.table.update("gpu", old, ("old again", UP), now);
        assert_eq!(fixture.table.client("gpu"), Some(&"old again"));
        fixture.table.update("gpu", new, ("new again", UP), now);
        assert_eq!(fixture.table.client("gpu"), Some(&"new again"));
        fixture.table.disconnect("gpu", new, now);
        assert_eq!(fixture.table.client("gpu"), Some(&"old again"));
        fixture.table.disconnect("gpu", old, now);
        assert_eq!(fixture.table.client("gpu"), Some(&"new again"));
        assert!(fixture.table.remove("gpu", &socket("new"), now));
        assert_eq!(fixture.table.client("gpu"), Some(&"old again"));
        assert!(fixture.table.remove("gpu", &socket("old"), now));
        assert_eq!((fixture.table.client("gpu"), fixture.table.client("nic")), (None, None));
        assert!(!fixture.table.remove("gpu", &socket("old"), now));
        assert!(!fixture.table.remove("nic", &socket("old"), now));
    }

    #[test]
    fn an_endpoint_is_registered_once() {
        let mut fixture = Fixture::new();
        let stop = CancellationToken::new();
        let now = fixture.at(0);
        let first = fixture.table.add("gpu", &socket("a"), ("a", UP), stop.clone().drop_guard(), now);
        let first = first.expect("added");
        let again = fixture.table.add("gpu", &socket("a"), ("b", UP), CancellationToken::new().drop_guard(), now);
        assert_eq!(again, Err("endpoint /a already registered for DRA driver plugin gpu".to_owned()));
        assert_eq!(fixture.table.client("gpu"), Some(&"a"));
        fixture.add("nic", "a", UP, 0);
        assert!(!stop.is_cancelled());
        fixture.table.remove("gpu", &socket("a"), now);
        assert!(stop.is_cancelled());

        // The task of the former registration changes nothing.
        fixture.add("gpu", "a", UP, 0);
        fixture.table.update("gpu", first, ("former", DOWN), now);
        fixture.table.disconnect("gpu", first, now);
        assert_eq!((fixture.table.client("gpu"), fixture.table.next_gone()), (Some(&"a"), None));
    }

    #[test]
    fn the_numbers_of_drivers_and_endpoints_are_limited() {
        let mut fixture = Fixture::new();
        let now = fixture.at(0);
        let mut add = |driver: &str, name: &str| {
            let task = CancellationToken::new().drop_guard();
            fixture.table.add(driver, &socket(name), ("client", DOWN), task, now)
        };
        for number in 0..256 {
            add(&format!("d{number}"), "e0").expect("added");
        }
        assert_eq!(add("d256", "e0"), Err("at most 256 DRA drivers can be registered".to_owned()));
        for number in 1..8 {
            add("d0", &format!("e{number}")).expect("added");
        }
        let error = "at most 8 endpoints can be registered for DRA driver plugin d0";
        assert_eq!(add("d0", "e8"), Err(error.to_owned()));
        // A driver that is gone leaves room.
        fixture.table.remove("d1", &socket("e0"), now);
        assert_eq!(fixture.gone(30).len(), 256);
        fixture.add("d256", "e0", UP, 31);
    }

    /// AC-06c-23
    #[test]
    fn a_driver_is_gone_after_30_seconds_without_a_connected_endpoint() {
        let mut fixture = Fixture::new();
        let none: [&str; 0] = [];
        let id = fixture.add("gpu", "a", UP, 0);
        assert_eq!((fixture.table.next_gone(), fixture.gone(100)), (None, vec![]));

        fixture.table.disconnect("gpu", id, fixture.at(100));
        assert_eq!(fixture.table.next_gone(), Some(fixture.at(130)));
        // Failed attempts do not extend the time.
        fixture.table.update("gpu", id, ("a", DOWN), fixture.at(105));
        assert_eq!(fixture.gone(129), none);
        fixture.table.update("gpu", id, ("a", UP), fixture.at(110));
        assert_eq!((fixture.table.next_gone(), fixture.gone(200)), (None, vec![]));

        fixture.table.disconnect("gpu", id, fixture.at(200));
        assert_eq!(fixture.gone(230), ["gpu"]);
        fixture.table.disconnect("gpu", id, fixture.at(231));
        assert_eq!((fixture.table.next_gone(), fixture.gone(300)), (None, vec![]));
        assert_eq!(fixture.table.client("gpu"), Some(&"a"));
        fixture.table.update("gpu", id, ("a", UP), fixture.at(300));

        // Another endpoint is still connected.
        let other = fixture.add("gpu", "b", UP, 300);
        fixture.table.disconnect("gpu", id, fixture.at(300));
        assert_eq!(fixture.gone(400), none);
        fixture.table.disconnect("gpu", other, fixture.at(400));
        assert_eq!(fixture.gone(430), ["gpu"]);
    }

    #[test]
    fn a_driver_without_endpoints_is_gone_too() {
        let mut fixture = Fixture::new();
        fixture.add("gpu", "a", UP, 0);
        let now = fixture.at(10);
        fixture.table.remove("gpu", &socket("a"), now);
        // Registers again within 30 s.
        fixture.add("gpu", "b", UP, 39);
        assert!(fixture.gone(50).is_empty());
        let now = fixture.at(50);
        fixture.table.remove("gpu", &socket("b"), now);
        assert_eq!(fixture.gone(80), ["gpu"]);
        assert_eq!((fixture.table.next_gone(), fixture.gone(200)), (None, vec![]));

        // Never connected.
        fixture.add("gpu", "a", DOWN, 200);
        assert_eq!(fixture.gone(230), ["gpu"]);
    }
}
