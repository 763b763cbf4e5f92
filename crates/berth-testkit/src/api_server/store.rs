//! In-memory object store with a global resource version, per-resource event ring, and watches.
//!
//! Objects are raw JSON. The ring has the last 1000 events of a resource, with the object before and after. A commit
//! notifies watches synchronously, so that no watch sees a change late or twice. Implements spec 10a §2, §5.

use std::{
    collections::{BTreeMap, HashMap, VecDeque},
    sync::{Arc, OnceLock},
};

use bytes::Bytes;
use jiff::Timestamp;
use serde_json::{Value, json};
use tokio::sync::mpsc;

use super::{
    selectors::{Requirement, selects},
    view::Change,
};

/// Capacity of the event ring of a resource.
const RING: usize = 1000;
/// Buffer capacity of a watch; a watch that is further behind is cut.
pub const BUFFER: usize = 100;
/// Initial resource version.
const FIRST: u64 = 1000;

/// Namespace and name.
pub type Key = (String, String);

/// Selection of a list or watch.
#[derive(Clone, Debug, Default)]
pub struct Filter {
    /// Namespace; empty selects all.
    pub namespace: String,
    pub fields: Vec<Requirement>,
    pub labels: Vec<Requirement>,
}

impl Filter {
    pub fn takes(&self, object: &Value) -> bool {
        (self.namespace.is_empty() || object["metadata"]["namespace"] == self.namespace.as_str())
            && selects(&self.fields, &self.labels, object)
    }
}

/// Committed change of an object.
#[derive(Debug)]
pub struct Event {
    pub rv: u64,
    pub at: Timestamp,
    pub before: Option<Arc<Value>>,
    pub after: Option<Arc<Value>>,
    lines: [OnceLock<Bytes>; 3],
}

impl Event {
    /// Line of a watch with that filter: ADDED, MODIFIED, or DELETED, by whether the filter matches before and after.
    pub fn line(&self, filter: &Filter) -> Option<Bytes> {
        let takes = |object: &Option<Arc<Value>>| object.as_deref().is_some_and(|object| filter.takes(object));
        match (takes(&self.before), takes(&self.after)) {
            (false, true) => Some(self.encoded(0, "ADDED", &self.after)),
            (true, true) => Some(self.encoded(1, "MODIFIED", &self.after)),
            (true, false) => Some(self.encoded(2, "DELETED", &self.before)),
            (false, false) => None,
        }
    }

    fn encoded(&self, slot: usize, kind: &str, object: &Option<Arc<Value>>) -> Bytes {
        let make = || {
            let mut object = object.as_deref().cloned().unwrap_or_default();
            object["metadata"]["resourceVersion"] = json!(self.rv.to_string());
            line(kind, &object)
        };
        self.lines[slot].get_or_init(make).clone()
    }
}

/// Encodes one watch event as a JSON line.
pub fn line(kind: &str, object: &Value) -> Bytes {
    Bytes::from(format!("{{\"type\":\"{kind}\",\"object\":{object}}}\n"))
}

/// Item in the queue of a watch.
#[derive(Debug)]
pub enum Item {
    Event(Bytes),
    /// Ends the stream; the text is the reason in the request log.
    End(&'static str),
}

#[derive(Debug)]
struct Listener {
    filter: Arc<Filter>,
    /// Resource version up to which events are not sent.
    after: u64,
    sender: mpsc::Sender<Item>,
}

#[derive(Debug)]
struct Table {
    objects: BTreeMap<Key, Arc<Value>>,
    ring: VecDeque<Arc<Event>>,
    /// Lowest resource version at which a watch may start.
    floor: u64,
    listeners: Vec<Listener>,
}

/// All stored objects, events, and watches.
#[derive(Debug)]
pub struct Store {
    rv: u64,
    tables: HashMap<String, Table>,
    changes: Vec<Change>,
}

impl Store {
    pub fn new() -> Self {
        Self { rv: FIRST, tables: HashMap::new(), changes: Vec::new() }
    }

    /// Latest resource version.
    pub fn rv(&self) -> u64 {
        self.rv
    }

    /// Takes the changes since the last call.
    pub fn take_changes(&mut self) -> Vec<Change> {
        std::mem::take(&mut self.changes)
    }

    pub fn get(&self, resource: &str, key: &Key) -> Option<&Arc<Value>> {
        self.tables.get(resource)?.objects.get(key)
    }

    /// All objects of a resource, sorted by namespace and name.
    pub fn list(&self, resource: &str) -> Vec<Arc<Value>> {
        self.tables.get(resource).map(|table| table.objects.values().cloned().collect()).unwrap_or_default()
    }

    /// All objects of a resource as of `rv`, as far back as the ring reaches.
    pub fn list_at(&self, resource: &str, rv: u64) -> Vec<Arc<Value>> {
        let Some(table) = self.tables.get(resource) else { return Vec::new() };
        if table.ring.back().is_none_or(|event| event.rv <= rv) {
            return self.list(resource);
        }
        let mut objects = table.objects.clone();
        for event in table.ring.iter().rev().take_while(|event| event.rv > rv) {
            let Some(object) = event.after.as_ref().or(event.before.as_ref()) else { continue };
            match &event.before {
                Some(before) => drop(objects.insert(key(object), before.clone())),
                None => drop(objects.remove(&key(object))),
            }
        }
        objects.into_values().collect()
    }

    /// Latest resource version at that time, as far back as the ring reaches.
    pub fn rv_at(&self, resource: &str, at: Timestamp) -> u64 {
        let Some(table) = self.tables.get(resource) else { return self.rv };
        let newer = table.ring.iter().rev().take_while(|event| event.at > at).last();
        newer.map_or(self.rv, |event| event.rv.saturating_sub(1))
    }

    /// Resource version of the resource's latest event.
    pub fn newest(&self, resource: &str) -> u64 {
        let last = self.tables.get(resource).and_then(|table| table.ring.back());
        last.map_or(FIRST, |event| event.rv)
    }

    /// Lowest resource version at which a watch of the resource may start.
    pub fn floor(&self, resource: &str) -> u64 {
        self.tables.get(resource).map_or(FIRST, |table| table.floor)
    }

    /// Stores an object, or removes it, and notifies watches; returns the new object, or the removed one.
    pub fn commit(&mut self, resource: &str, key: &Key, after: Option<Value>, at: Timestamp) -> Arc<Value> {
        self.rv += 1;
        let rv = self.rv;
        let after = after.map(|mut object| {
            object["metadata"]["resourceVersion"] = json!(rv.to_string());
            Arc::new(object)
        });
        let table = self.table(resource);
        let before = match &after {
            Some(object) => table.objects.insert(key.clone(), object.clone()),
            None => table.objects.remove(key),
        };
        let event = Event { rv, at, before: before.clone(), after: after.clone(), lines: Default::default() };
        table.push(Arc::new(event));
        let last = after.clone().or_else(|| before.clone()).unwrap_or_default();
        self.changes.push(Change { resource: resource.to_owned(), before, after });
        last
    }

    /// Adds a watch: returns the matching events after `rv`, and a receiver of later ones.
    pub fn subscribe(&mut self, resource: &str, filter: &Arc<Filter>, rv: u64) -> (Vec<Bytes>, mpsc::Receiver<Item>) {
        let (sender, receiver) = mpsc::channel(BUFFER);
        let table = self.table(resource);
        let missed = table.ring.iter().filter(|event| event.rv > rv).filter_map(|event| event.line(filter)).collect();
        table.listeners.push(Listener { filter: filter.clone(), after: rv, sender });
        (missed, receiver)
    }

    /// Sends an item without a change, such as an injected line or an end, to every watch of the resource.
    pub fn broadcast(&mut self, resource: &str, item: impl Fn() -> Item) {
        self.table(resource).listeners.retain(|listener| listener.sender.try_send(item()).is_ok());
    }

    /// Number of open watches of the resource.
    pub fn watches(&self, resource: &str) -> usize {
        let open = |table: &Table| table.listeners.iter().filter(|listener| !listener.sender.is_closed()).count();
        self.tables.get(resource).map_or(0, open)
    }

    /// Removes events up to `rv`.
    pub fn compact(&mut self, resource: &str, rv: u64) {
        let rv = rv.min(self.rv);
        let table = self.table(resource);
        table.ring.retain(|event| event.rv > rv);
        table.floor = table.floor.max(rv);
    }

    /// Removes all events.
    pub fn wipe(&mut self) {
        let rv = self.rv;
        for table in self.tables.values_mut() {
            table.ring.clear();
            table.floor = rv;
        }
    }

    /// Dumps all objects as JSON.
    pub fn dump(&self) -> Value {
        let objects: Vec<&Arc<Value>> = self.tables.values().flat_map(|table| table.objects.values()).collect();
        let objects: Vec<&Value> = objects.into_iter().map(Arc::as_ref).collect();
        json!({"resourceVersion": self.rv, "items": objects})
    }

    fn table(&mut self, resource: &str) -> &mut Table {
        let new = || Table { objects: BTreeMap::new(), ring: VecDeque::new(), floor: FIRST, listeners: Vec::new() };
        self.tables.entry(resource.to_owned()).or_insert_with(new)
    }
}

impl Table {
    fn push(&mut self, event: Arc<Event>) {
        self.listeners.retain(|listener| {
            if event.rv <= listener.after {
                return !listener.sender.is_closed();
            }
            match event.line(&listener.filter) {
                // Cuts a slow watch: its stream ends after the buffered events.
                Some(line) => listener.sender.try_send(Item::Event(line)).is_ok(),
                None => !listener.sender.is_closed(),
            }
        });
        self.ring.push_back(event);
        if self.ring.len() > RING
            && let Some(oldest) = self.ring.pop_front()
        {
            self.floor = oldest.rv;
        }
    }
}

/// Namespace and name of an object.
pub fn key(object: &Value) -> Key {
    let word = |field: &str| object["metadata"][field].as_str().unwrap_or_default().to_owned();
    (word("namespace"), word("name"))
}
