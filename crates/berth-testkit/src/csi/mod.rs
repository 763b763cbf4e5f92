//! A CSI driver over the real contract: it keeps volumes as directories, binds them where it is told, and fails,
//! hangs or dies on demand. What it has mounted is what the machine has mounted.

mod node;
mod registration;

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use serde_json::Value;
use tokio::{
    net::UnixListener,
    runtime::{self, Runtime},
    sync::watch,
};
use tokio_stream::wrappers::UnixListenerStream;
use tonic::{Code, Status, transport::Server};

use berth_proto::csi::{
    identity_server::IdentityServer, node_server::NodeServer, node_service_capability::rpc::Type as Capability,
};

pub use registration::{Asked, Manners, Plugin};

/// What it is asked, in order.
#[derive(Clone, Debug, PartialEq)]
pub struct Call {
    /// `NodeStageVolume`.
    pub method: &'static str,
    /// The volume; empty for calls about none.
    pub volume: String,
    /// Where: target, or staging directory.
    pub path: PathBuf,
    /// The rest, as far as tests look at it.
    pub rest: Value,
    /// Whether it was answered well; `None` while it is under way.
    pub ok: Option<bool>,
}

/// What goes wrong with a call.
#[derive(Clone, Debug)]
pub enum Fault {
    /// Refused, and nothing is done.
    Refuse(Code, &'static str),
    /// Done, and yet that is the answer.
    DoneBut(Code, &'static str),
    /// Nothing is done, and it says that it was. For calls without an answer's content only.
    Lie,
    /// No answer until [`CsiDriver::release`]; nothing is done.
    Hang,
    /// The driver's process ends in the middle: done, and the connection is lost.
    DieAfter,
}

/// How it is.
#[derive(Clone, Debug)]
pub struct Nature {
    /// Its name.
    pub name: String,
    /// What it calls the node.
    pub node_id: String,
    /// Where the node is.
    pub topology: BTreeMap<String, String>,
    /// How many volumes the node takes.
    pub max_volumes: i64,
    /// What it can do.
    pub can: Vec<Capability>,
    /// Whether its volumes are not well, and what it says of that.
    pub condition: Option<(bool, String)>,
}

impl Nature {
    /// One that stages, counts and expands.
    pub fn of(name: &str) -> Self {
        Self {
            name: name.to_owned(),
            node_id: format!("{name}-node"),
            topology: BTreeMap::new(),
            max_volumes: 0,
            can: vec![Capability::StageUnstageVolume, Capability::GetVolumeStats, Capability::ExpandVolume],
            condition: None,
        }
    }
}

#[derive(Default)]
struct State {
    calls: Vec<Call>,
    faults: Vec<(&'static str, usize, Fault)>,
    sizes: BTreeMap<String, i64>,
}

/// What the servers share.
struct Shared {
    nature: Mutex<Nature>,
    state: Mutex<State>,
    moved: watch::Sender<u64>,
    release: watch::Sender<u64>,
    data: PathBuf,
    dies: watch::Sender<u64>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn end(serving: &Mutex<Option<Runtime>>) {
    if let Some(runtime) = lock(serving).take() {
        runtime.shutdown_background();
    }
}

/// A driver, and its servers.
pub struct CsiDriver {
    shared: Arc<Shared>,
    /// Where it serves.
    pub endpoint: PathBuf,
    serving: Arc<Mutex<Option<Runtime>>>,
}

impl CsiDriver {
    /// A driver that serves on `<root>/plugins/<name>/csi.sock` and keeps its volumes in `data`.
    pub async fn start(nature: Nature, root: &Path, data: &Path) -> Self {
        let directory = root.join("plugins").join(&nature.name);
        fs::create_dir_all(&directory).expect("a directory");
        fs::create_dir_all(data).expect("a directory");
        let shared = Arc::new(Shared {
            nature: Mutex::new(nature),
            state: Mutex::default(),
            moved: watch::Sender::new(0),
            release: watch::Sender::new(0),
            data: data.to_owned(),
            dies: watch::Sender::new(0),
        });
        let mut driver = Self { shared, endpoint: directory.join("csi.sock"), serving: Arc::default() };
        driver.serve().await;
        driver
    }

    /// Serves, on a new socket, in a runtime of its own: when that goes, connections are lost as with a process.
    pub async fn serve(&mut self) {
        let _ = fs::remove_file(&self.endpoint); // there is none at first
        let listener = std::os::unix::net::UnixListener::bind(&self.endpoint).expect("a socket");
        listener.set_nonblocking(true).expect("a socket");
        let runtime = runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().expect("a runtime");
        let shared = self.shared.clone();
        runtime.spawn(async move {
            let listener = UnixListener::from_std(listener).expect("a socket");
            Server::builder()
                .add_service(NodeServer::from_arc(shared.clone()))
                .add_service(IdentityServer::from_arc(shared))
                .serve_with_incoming(UnixListenerStream::new(listener))
                .await
                .expect("served");
        });
        *lock(&self.serving) = Some(runtime);
        let (serving, mut dies) = (self.serving.clone(), self.shared.dies.subscribe());
        dies.mark_unchanged();
        tokio::spawn(async move {
            if dies.changed().await.is_ok() {
                end(&serving);
            }
        });
    }

    /// Ends, as its process would.
    pub async fn die(&mut self) {
        end(&self.serving);
    }

    /// Changes how it is.
    pub fn nature(&self, change: impl FnOnce(&mut Nature)) {
        change(&mut lock(&self.shared.nature));
    }

    /// How it is.
    pub fn name(&self) -> String {
        lock(&self.shared.nature).name.clone()
    }

    /// The next calls of that method go wrong.
    pub fn fail(&self, method: &'static str, times: usize, fault: Fault) {
        lock(&self.shared.state).faults.push((method, times, fault));
    }

    /// Nothing goes wrong any more.
    pub fn heal(&self) {
        lock(&self.shared.state).faults.clear();
        self.release();
    }

    /// What hangs goes on.
    pub fn release(&self) {
        self.shared.release.send_modify(|times| *times += 1);
    }

    /// Everything it was asked.
    pub fn calls(&self) -> Vec<Call> {
        lock(&self.shared.state).calls.clone()
    }

    /// Names of the calls about volumes, those that only ask left out.
    pub fn acts(&self) -> Vec<&'static str> {
        let is_act = |call: &&Call| !call.method.starts_with("NodeGet");
        self.calls().iter().filter(is_act).map(|call| call.method).collect()
    }

    /// Calls of one method.
    pub fn of(&self, method: &str) -> Vec<Call> {
        self.calls().into_iter().filter(|call| call.method == method).collect()
    }

    /// Waits until something holds of what it was asked.
    pub async fn until(&self, what: &str, holds: impl Fn(&Self) -> bool) {
        let mut moved = self.shared.moved.subscribe();
        let waiting = async {
            while !holds(self) {
                moved.changed().await.expect("it lives");
            }
        };
        let limit = Duration::from_secs(60);
        if tokio::time::timeout(limit, waiting).await.is_err() {
            panic!("not within {limit:?}: {what}; it was asked {:#?}", self.calls());
        }
    }

    /// The directory behind a volume.
    pub fn volume(&self, id: &str) -> PathBuf {
        self.shared.volume(id)
    }

    /// Bytes that a volume was expanded to.
    pub fn size(&self, id: &str) -> Option<i64> {
        lock(&self.shared.state).sizes.get(id).copied()
    }
}

impl Drop for CsiDriver {
    fn drop(&mut self) {
        end(&self.serving);
    }
}

impl Shared {
    fn volume(&self, id: &str) -> PathBuf {
        let path = self.data.join(id);
        fs::create_dir_all(&path).expect("a volume");
        path
    }

    fn fault(&self, method: &str) -> Option<Fault> {
        let mut state = lock(&self.state);
        let at = state.faults.iter().position(|(of, times, _)| *of == method && *times > 0)?;
        let (_, times, fault) = &mut state.faults[at];
        *times -= 1;
        Some(fault.clone())
    }

    /// Notes a call, lets go wrong what is to, and does the work.
    async fn act<T: Default>(
        &self,
        call: Call,
        work: impl FnOnce() -> Result<T, Status>,
    ) -> Result<tonic::Response<T>, Status> {
        let method = call.method;
        // Whoever sees the call may release it at once.
        let mut release = self.release.subscribe();
        release.mark_unchanged();
        let index = {
            let mut state = lock(&self.state);
            state.calls.push(call);
            state.calls.len() - 1
        };
        self.tell();
        let fault = self.fault(method);
        let done = match fault {
            None => work(),
            Some(Fault::Refuse(code, text)) => Err(Status::new(code, text)),
            Some(Fault::DoneBut(code, text)) => work().and(Err(Status::new(code, text))),
            Some(Fault::Lie) => Ok(T::default()),
            Some(Fault::Hang) => {
                release.changed().await.expect("it lives");
                work()
            }
            Some(Fault::DieAfter) => {
                let done = work();
                self.dies.send_modify(|times| *times += 1);
                done.and(std::future::pending().await)
            }
        };
        lock(&self.state).calls[index].ok = Some(done.is_ok());
        self.tell();
        done.map(tonic::Response::new)
    }

    fn tell(&self) {
        self.moved.send_modify(|times| *times += 1);
    }
}

/// What is mounted at or below a path.
pub fn mounts_below(path: &Path) -> Vec<PathBuf> {
    let table = fs::read_to_string("/proc/self/mountinfo").expect("a table");
    let places = table.lines().filter_map(|line| line.split(' ').nth(4)).map(PathBuf::from);
    places.filter(|place| place.starts_with(path)).collect()
}
