//! Objects as raw JSON, one counter for all, and per resource the last thousand events with the object before
//! and after. Who watches is told within the commit, so that nobody sees a change late or twice. Spec 10a §2, §5.

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

/// Events kept per resource.
const RING: usize = 1000;
/// Events a watch may be behind.
pub const BUFFER: usize = 100;
/// Resource versions begin above it.
const FIRST: u64 = 1000;

/// Namespace and name.
pub type Key = (String, String);

/// What a list or watch is of.
#[derive(Clone, Debug, Default)]
pub struct Filter {
    /// Empty: all.
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

/// A committed change.
#[derive(Debug)]
pub struct Event {
    pub rv: u64,
    pub at: Timestamp,
    pub before: Option<Arc<Value>>,
    pub after: Option<Arc<Value>>,
    lines: [OnceLock<Bytes>; 3],
}

impl Event {
    /// The line of a watch with that filter: into it ADDED, out of it DELETED, within it MODIFIED.
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

/// One event of a watch, as it is sent.
pub fn line(kind: &str, object: &Value) -> Bytes {
    Bytes::from(format!("{{\"type\":\"{kind}\",\"object\":{object}}}\n"))
}

/// What a watch is sent.
#[derive(Debug)]
pub enum Item {
    Event(Bytes),
    /// The stream ends, because: as the recorder has it.
    End(&'static str),
}

#[derive(Debug)]
struct Listener {
    filter: Arc<Filter>,
    /// Nothing up to it is told.
    after: u64,
    sender: mpsc::Sender<Item>,
}

#[derive(Debug)]
struct Table {
    objects: BTreeMap<Key, Arc<Value>>,
    ring: VecDeque<Arc<Event>>,
    /// Watches may begin at it and later.
    floor: u64,
    listeners: Vec<Listener>,
}

/// Everything that is stored.
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

    /// The last resource version.
    pub fn rv(&self) -> u64 {
        self.rv
    }

    /// Changes since it was last asked.
    pub fn take_changes(&mut self) -> Vec<Change> {
        std::mem::take(&mut self.changes)
    }

    pub fn get(&self, resource: &str, key: &Key) -> Option<&Arc<Value>> {
        self.tables.get(resource)?.objects.get(key)
    }

    /// As it is, by namespace and name.
    pub fn list(&self, resource: &str) -> Vec<Arc<Value>> {
        self.tables.get(resource).map(|table| table.objects.values().cloned().collect()).unwrap_or_default()
    }

    /// As it was at that resource version, as far as the ring reaches.
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

    /// The resource version that was the last at that time, as far as the ring reaches.
    pub fn rv_at(&self, resource: &str, at: Timestamp) -> u64 {
        let Some(table) = self.tables.get(resource) else { return self.rv };
        let newer = table.ring.iter().rev().take_while(|event| event.at > at).last();
        newer.map_or(self.rv, |event| event.rv.saturating_sub(1))
    }

    /// The newest resource version of that resource.
    pub fn newest(&self, resource: &str) -> u64 {
        let last = self.tables.get(resource).and_then(|table| table.ring.back());
        last.map_or(FIRST, |event| event.rv)
    }

    /// Before it no watch can begin.
    pub fn floor(&self, resource: &str) -> u64 {
        self.tables.get(resource).map_or(FIRST, |table| table.floor)
    }

    /// Stores an object, or removes it; it is told to who watches. What it was or is comes back, with its RV.
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

    /// Events after `rv` that the filter takes, and what comes from now on.
    pub fn subscribe(&mut self, resource: &str, filter: &Arc<Filter>, rv: u64) -> (Vec<Bytes>, mpsc::Receiver<Item>) {
        let (sender, receiver) = mpsc::channel(BUFFER);
        let table = self.table(resource);
        let missed = table.ring.iter().filter(|event| event.rv > rv).filter_map(|event| event.line(filter)).collect();
        table.listeners.push(Listener { filter: filter.clone(), after: rv, sender });
        (missed, receiver)
    }

    /// Sends that to every watch of the resource: lines that no change stands behind, or an end.
    pub fn tell(&mut self, resource: &str, item: impl Fn() -> Item) {
        self.table(resource).listeners.retain(|listener| listener.sender.try_send(item()).is_ok());
    }

    /// How many watch it.
    pub fn watches(&self, resource: &str) -> usize {
        let open = |table: &Table| table.listeners.iter().filter(|listener| !listener.sender.is_closed()).count();
        self.tables.get(resource).map_or(0, open)
    }

    /// Forgets events up to that resource version.
    pub fn compact(&mut self, resource: &str, rv: u64) {
        let rv = rv.min(self.rv);
        let table = self.table(resource);
        table.ring.retain(|event| event.rv > rv);
        table.floor = table.floor.max(rv);
    }

    /// Forgets all events.
    pub fn wipe(&mut self) {
        let rv = self.rv;
        for table in self.tables.values_mut() {
            table.ring.clear();
            table.floor = rv;
        }
    }

    /// Everything, to be kept in a file.
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
                // Who does not read is cut off: the stream ends once he has read what is in the buffer.
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
