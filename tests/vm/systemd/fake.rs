//! Fake systemd: speaks its D-Bus protocol on a private socket, and creates unit directories.
//!
//! The directories are in a folder that resembles cgroup v2.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
};

use berth_sys::cgroup::{
    Hierarchy,
    systemd::{Bus, names},
    v2::UnifiedHierarchy,
};
use tokio::{net::UnixListener, sync::Notify, task::JoinHandle};
use tokio_stream::StreamExt;
use zbus::{Connection, Guid, Message, MessageStream, OwnedVariant, Variant, connection::Builder};

const OBJECT: &str = "/org/freedesktop/systemd1";
const MANAGER: &str = "org.freedesktop.systemd1.Manager";
/// Cgroup files and their initial content: no longer than what is written over it, because these files, unlike the
/// kernel's, are not truncated.
const FILES: [(&str, &str); 12] = [
    ("cgroup.controllers", "cpuset cpu memory pids"),
    ("cgroup.subtree_control", ""),
    ("cgroup.procs", ""),
    ("cpu.weight", ""),
    ("cpu.max", "max 100000"),
    ("memory.max", "max"),
    ("memory.min", "0"),
    ("memory.low", "0"),
    ("memory.swap.max", ""),
    ("pids.max", ""),
    ("cpuset.cpus", ""),
    ("cpuset.mems", ""),
];

/// A one-time fault of a unit.
#[derive(Clone, PartialEq, Eq)]
pub enum Fault {
    /// The call fails, with this error name and text.
    Refused(&'static str, &'static str),
    /// The job ends with that result.
    Ends(&'static str),
    /// The job ends before the reply that names it.
    EndsEarly,
    /// The connection closes without a reply.
    HangsUp,
}

/// The fake service manager; stops when dropped.
pub struct Fake {
    pub place: tempfile::TempDir,
    state: Arc<State>,
    serving: JoinHandle<()>,
}

#[derive(Default)]
struct State {
    root: PathBuf,
    calls: Mutex<Vec<String>>,
    called: Notify,
    faults: Mutex<BTreeMap<String, Fault>>,
    units: Mutex<BTreeMap<String, PathBuf>>,
    jobs: Mutex<u32>,
    processes: Mutex<BTreeSet<u32>>,
}

impl Fake {
    pub fn start() -> Self {
        let place = tempfile::tempdir().expect("a folder");
        let root = place.path().join("cgroup");
        fs::create_dir(&root).expect("made");
        for (file, value) in &FILES[..2] {
            fs::write(root.join(file), value).expect("written");
        }
        let listener = UnixListener::bind(place.path().join("private")).expect("a socket");
        let state = Arc::new(State { root, ..State::default() });
        let serving = tokio::spawn(serve(listener, state.clone()));
        Self { place, state, serving }
    }

    pub fn bus(&self) -> Arc<Bus> {
        Arc::new(Bus::at(self.place.path().join("private")))
    }

    pub fn hierarchy(&self) -> Hierarchy {
        Hierarchy::V2(UnifiedHierarchy::at(self.state.root.clone()).expect("looks like one"))
    }

    pub fn fault(&self, unit: &str, fault: Fault) {
        self.state.faults.lock().expect("whole").insert(unit.to_owned(), fault);
    }

    /// Takes the calls so far.
    pub fn calls(&self) -> Vec<String> {
        std::mem::take(&mut *self.state.calls.lock().expect("whole"))
    }

    /// Waits for a call with that prefix.
    pub async fn until_called(&self, beginning: &str) -> String {
        loop {
            let called = self.state.called.notified();
            if let Some(call) = self.state.calls.lock().expect("whole").iter().find(|c| c.starts_with(beginning)) {
                return call.clone();
            }
            called.await;
        }
    }

    pub fn processes(&self) -> BTreeSet<u32> {
        self.state.processes.lock().expect("whole").clone()
    }

    /// Content of a cgroup file.
    pub fn file(&self, path: &str) -> String {
        let at = self.path(path);
        fs::read_to_string(&at).unwrap_or_else(|e| panic!("{}: {e}", at.display()))
    }

    pub fn path(&self, path: &str) -> PathBuf {
        self.state.root.join(path.trim_start_matches('/'))
    }
}

impl Drop for Fake {
    fn drop(&mut self) {
        self.serving.abort();
    }
}

async fn serve(listener: UnixListener, state: Arc<State>) {
    while let Ok((socket, _)) = listener.accept().await {
        let state = state.clone();
        tokio::spawn(async move {
            let socket = socket.into_std().expect("a socket");
            let made = Builder::unix_stream(socket).server(Guid::generate()).p2p().build_message_stream().await;
            let mut messages: MessageStream = made.expect("a connection");
            let connection = Connection::from(&messages);
            while let Some(Ok(message)) = messages.next().await {
                if state.answer(&connection, &message).await.is_none() {
                    return connection.close().await.expect("closed");
                }
            }
        });
    }
}

type Properties = Vec<(String, OwnedVariant)>;

impl State {
    /// Replies to a message; `None` closes the connection.
    async fn answer(&self, connection: &Connection, message: &Message) -> Option<()> {
        let (header, body) = (message.header(), message.body());
        let member = header.member().map(|member| member.to_string()).unwrap_or_default();
        let (unit, properties) = match member.as_str() {
            "Get" => {
                connection.reply(&header, &Variant::new("252.39-1~fake")).await.expect("sent");
                return Some(());
            }
            "StartTransientUnit" => {
                let (unit, mode, properties, _): (String, String, Properties, Vec<(String, Properties)>) =
                    body.deserialize().expect("its arguments");
                assert_eq!(mode, "replace");
                (unit, properties)
            }
            "SetUnitProperties" => {
                let (unit, runtime, properties): (String, bool, Properties) =
                    body.deserialize().expect("its arguments");
                assert!(runtime);
                (unit, properties)
            }
            "StopUnit" => {
                let (unit, mode): (String, String) = body.deserialize().expect("its arguments");
                assert_eq!(mode, "replace");
                (unit, Vec::new())
            }
            "ResetFailedUnit" => (body.deserialize::<String>().expect("its argument"), Vec::new()),
            other => panic!("{other} is asked of nobody"),
        };
        let settings: Vec<String> = properties.iter().map(|(name, value)| format!("{name}={}", show(value))).collect();
        self.calls.lock().expect("whole").push(format!("{member} {unit} {}", settings.join(" ")).trim_end().to_owned());
        self.called.notify_waiters();
        let fault = self.faults.lock().expect("whole").remove(&unit);
        let refuse = async |name: &str, text: &str| {
            let name = format!("org.freedesktop.{name}");
            connection.reply_error(&header, name.as_str(), &text).await.expect("sent");
            Some(())
        };
        match &fault {
            Some(Fault::HangsUp) => return None,
            Some(Fault::Refused(name, text)) => return refuse(name, text).await,
            _ => {}
        }
        let is_there = self.units.lock().expect("whole").contains_key(&unit);
        match member.as_str() {
            "StartTransientUnit" if is_there => {
                return refuse("systemd1.UnitExists", "Unit was already loaded or has a fragment file.").await;
            }
            "StopUnit" | "SetUnitProperties" if !is_there => {
                return refuse("systemd1.NoSuchUnit", "Unit not loaded.").await;
            }
            "ResetFailedUnit" => return refuse("systemd1.NoSuchUnit", "Unit not loaded.").await,
            "StartTransientUnit" => self.make(&unit, &properties),
            "StopUnit" => self.remove(&unit),
            _ => {
                connection.reply(&header, &()).await.expect("sent");
                return Some(());
            }
        }
        let number = {
            let mut jobs = self.jobs.lock().expect("whole");
            *jobs += 1;
            *jobs
        };
        let job = zbus::ObjectPath::try_from(format!("{OBJECT}/job/{number}")).expect("a path");
        let result = if let Some(Fault::Ends(result)) = fault { result } else { "done" };
        let end = (number, &job, unit.as_str(), result);
        let emit_job_removed = async || {
            connection.emit_signal(None::<()>, OBJECT, MANAGER, "JobRemoved", &end).await.expect("sent");
        };
        if fault == Some(Fault::EndsEarly) {
            emit_job_removed().await;
            connection.reply(&header, &job).await.expect("sent");
        } else {
            connection.reply(&header, &job).await.expect("sent");
            emit_job_removed().await;
        }
        Some(())
    }

    fn make(&self, unit: &str, properties: &Properties) {
        let text = |name: &str| properties.iter().find(|(n, _)| n == name).map(|(_, value)| show(value));
        let slice = if names::is_slice(unit) { unit.to_owned() } else { text("Slice").expect("a slice") };
        let mut at = self.root.clone();
        for part in names::path_of(&slice).expect("a slice").to_string().trim_matches('/').split('/') {
            at.push(part);
            directory(&at);
        }
        if !names::is_slice(unit) {
            at.push(unit);
            directory(&at);
            let list = text("PIDs").expect("processes");
            let pids = list.trim_matches(['[', ']']).split(", ").map(|pid| pid.parse::<u32>().expect("a number"));
            self.processes.lock().expect("whole").extend(pids);
        }
        self.units.lock().expect("whole").insert(unit.to_owned(), at);
    }

    fn remove(&self, unit: &str) {
        if let Some(at) = self.units.lock().expect("whole").remove(unit) {
            fs::remove_dir_all(at).expect("removed");
        }
    }
}

fn directory(at: &Path) {
    if fs::create_dir(at).is_ok() {
        for (file, value) in FILES {
            fs::write(at.join(file), value).expect("written");
        }
    }
}

fn show(value: &Variant<'_>) -> String {
    match value {
        Variant::U64(u64::MAX) => "infinity".to_owned(),
        Variant::U64(number) => number.to_string(),
        Variant::Bool(flag) => flag.to_string(),
        Variant::Str(text) => text.to_string(),
        Variant::Array(array) => {
            let all: Vec<String> = array.iter().map(show).collect();
            format!("[{}]", all.join(", "))
        }
        Variant::U8(number) => format!("{number:02x}"),
        Variant::U32(number) => number.to_string(),
        other => panic!("{other:?} is no property of ours"),
    }
}
