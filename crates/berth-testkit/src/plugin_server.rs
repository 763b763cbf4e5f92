//! Socket, recorded calls, and faults of sample plugins: device plugin and DRA driver.

use std::{
    collections::BTreeMap,
    fmt::Debug,
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

use futures::future::BoxFuture;
use tokio::{
    net::UnixListener,
    runtime::{self, Runtime},
    sync::watch,
    time::timeout,
};
use tokio_stream::wrappers::UnixListenerStream;
use tonic::{Status, service::Routes, transport::Server};

/// Maximum time that [`ServiceScript::wait_for_calls`] waits.
const LIMIT: Duration = Duration::from_secs(60);

/// Fault of all calls of a method.
#[derive(Clone, Debug)]
pub enum PluginFault {
    /// Returns this error. A stream fails before its first message.
    Fail(Status),
    /// Does not answer until the fault is removed or replaced.
    Hang,
}

/// gRPC server on a Unix socket; drop loses its connections and removes its socket.
#[derive(Default)]
pub(crate) struct PluginServer {
    /// Path of the socket, and the runtime that serves it.
    serving: Option<(PathBuf, Runtime)>,
}

impl PluginServer {
    /// Stops serving if necessary, and serves on a new socket, whose directory must exist.
    ///
    /// A tokio runtime of its own serves: its shutdown loses connections as the end of a process does.
    ///
    /// # Panics
    /// The socket cannot be created.
    pub fn start(&mut self, socket: &Path, routes: Routes) {
        self.stop();
        let _ = fs::remove_file(socket); // there is none at first
        let listener = std::os::unix::net::UnixListener::bind(socket).expect("failed to listen on the socket");
        listener.set_nonblocking(true).expect("failed to listen on the socket");
        let runtime = runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
        let runtime = runtime.expect("failed to build the tokio runtime");
        runtime.spawn(async move {
            let listener = UnixListener::from_std(listener).expect("failed to listen on the socket");
            let router = Server::builder().add_routes(routes);
            router.serve_with_incoming(UnixListenerStream::new(listener)).await.expect("served");
        });
        self.serving = Some((socket.to_owned(), runtime));
    }

    /// Removes the socket and loses all connections, as the end of the plugin's process does. Idempotent.
    pub fn stop(&mut self) {
        if let Some((socket, runtime)) = self.serving.take() {
            let _ = fs::remove_file(socket); // the agent removes sockets at its start
            runtime.shutdown_background();
        }
    }
}

impl Drop for PluginServer {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Answers, faults, and recorded calls of a service, which it shares with the test. `M` is a method, `C` a call with
/// its request, `B` determines the answers.
pub(crate) struct ServiceScript<M, C, B> {
    behavior: watch::Sender<B>,
    faults: watch::Sender<BTreeMap<M, PluginFault>>,
    calls: watch::Sender<Vec<(M, C)>>,
    /// Each change ends the open streams.
    stream_ends: watch::Sender<u64>,
}

impl<M: Copy + Debug + Ord, C: Clone + Debug, B: Clone> ServiceScript<M, C, B> {
    pub fn new(behavior: B) -> Self {
        Self {
            behavior: watch::Sender::new(behavior),
            faults: watch::Sender::new(BTreeMap::new()),
            calls: watch::Sender::new(Vec::new()),
            stream_ends: watch::Sender::new(0),
        }
    }

    /// Records a call on its arrival, and waits as long as it hangs; returns the behavior that applies to it.
    ///
    /// # Errors
    /// The error of [`PluginFault::Fail`].
    pub async fn enter(&self, method: M, call: C) -> Result<B, Status> {
        self.calls.send_modify(|calls| calls.push((method, call)));
        let mut changes = self.faults.subscribe();
        let answers = |faults: &BTreeMap<M, PluginFault>| !matches!(faults.get(&method), Some(PluginFault::Hang));
        let faults = changes.wait_for(answers).await.expect("the script owns the sender").clone();
        match faults.get(&method) {
            Some(PluginFault::Fail(status)) => Err(status.clone()),
            _ => Ok(self.behavior()),
        }
    }

    /// Current behavior.
    pub fn behavior(&self) -> B {
        self.behavior.borrow().clone()
    }

    /// Changes the answers to later calls.
    pub fn change_behavior(&self, change: impl FnOnce(&mut B)) {
        self.behavior.send_modify(change);
    }

    /// Injects a fault into all later calls of a method until [`Self::heal`].
    pub fn fail(&self, method: M, fault: PluginFault) {
        self.faults.send_modify(|faults| drop(faults.insert(method, fault)));
    }

    /// Removes all faults; hanging calls continue.
    pub fn heal(&self) {
        self.faults.send_modify(BTreeMap::clear);
    }

    /// All recorded calls, in order of arrival.
    pub fn calls(&self) -> Vec<C> {
        self.calls.borrow().iter().map(|(_, call)| call.clone()).collect()
    }

    /// Waits until a method has been called at least `count` times since the start; returns its calls.
    ///
    /// # Panics
    /// There are fewer calls after 60 seconds.
    pub async fn wait_for_calls(&self, method: M, count: usize) -> Vec<C> {
        let mut receiver = self.calls.subscribe();
        let is_enough = |calls: &Vec<(M, C)>| calls.iter().filter(|(called, _)| *called == method).count() >= count;
        if timeout(LIMIT, receiver.wait_for(is_enough)).await.is_err() {
            panic!("timed out after {LIMIT:?} waiting for {count} × {method:?}; calls: {:#?}", self.calls());
        }
        let calls = receiver.borrow();
        calls.iter().filter(|(called, _)| *called == method).map(|(_, call)| call.clone()).collect()
    }

    /// Ends the open streams without an error; the service still answers.
    pub fn end_streams(&self) {
        self.stream_ends.send_modify(|times| *times += 1);
    }

    /// Future that resolves when the streams opened until now are ended.
    pub fn stream_end(&self) -> BoxFuture<'static, ()> {
        let mut ends = self.stream_ends.subscribe();
        Box::pin(async move {
            let _ = ends.changed().await; // an error: the plugin is dropped
        })
    }
}
