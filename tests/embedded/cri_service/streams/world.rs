//! A runtime with a container that runs, and the listener before its streams.

use std::sync::Arc;

use berth::wiring::embedded_streams::RuntimeTargets;
use berth_proto::cri;
use berth_runtime::{runtime::Runtime, streams::IN_PROCESS};
use berth_server::streaming::serve::listener::Listening;
use tokio::{task::JoinHandle, time::timeout};
use tokio_util::sync::CancellationToken;

use berth_testkit::{
    embedded::{
        in_process::{Daemon, container, daemon, pod},
        place::{Place, skips},
    },
    streams::clients::{Door, LIMIT},
};

/// The flags of a request: stdin, stdout, stderr, terminal.
pub type Flags = [bool; 4];
/// All that has no terminal.
pub const ALL: Flags = [true, true, true, false];
/// All that has one.
pub const TERMINAL: Flags = [true, true, false, true];
/// What is printed only.
pub const READS: Flags = [false, true, false, false];
/// The status of what ended well.
pub const SUCCESS: &str = r#"{"metadata":{},"status":"Success"}"#;

/// The status of what ended with a code.
pub fn exit_status(code: u8) -> String {
    format!(
        r#"{{"metadata":{{}},"status":"Failure","message":"command terminated with non-zero exit code: exit status {code}","reason":"NonZeroExitCode","details":{{"causes":[{{"reason":"ExitCode","message":"{code}"}}]}}}}"#
    )
}

/// A listener before a runtime.
pub struct Streams {
    /// Where.
    pub door: Door,
    /// What its URLs begin with.
    pub url: String,
    /// Ends it.
    pub stop: CancellationToken,
    task: JoinHandle<()>,
}

impl Streams {
    /// Before a runtime.
    pub async fn of(runtime: &Arc<Runtime>) -> Self {
        let listening = Listening::bind("127.0.0.1:0").await.expect("a port");
        let url = listening.url();
        let door = Door(url.strip_prefix("http://").expect("http").parse().expect("an address"));
        let stop = CancellationToken::new();
        let task = tokio::spawn(listening.serve(Arc::new(RuntimeTargets(runtime.clone())), stop.clone()));
        Self { door, url, stop, task }
    }

    /// Ends it.
    pub async fn end(self) {
        self.stop.cancel();
        timeout(LIMIT, self.task).await.expect("in time").expect("no panic");
    }
}

/// A runtime with a container that runs, and the door to its streams.
pub struct World {
    /// The runtime.
    pub daemon: Daemon,
    /// Where its streams are asked for.
    pub door: Door,
    /// The sandbox.
    pub sandbox: String,
    /// The container.
    pub container: String,
    streams: Streams,
    place: Place,
}

impl World {
    /// `None` where this machine cannot run it; says so.
    pub async fn with(test: &str, config: cri::ContainerConfig) -> Option<Self> {
        if skips(test) {
            return None;
        }
        let place = Place::new();
        let daemon = daemon(place.path()).await;
        let streams = Streams::of(&daemon.runtime).await;
        let sandbox = daemon.run(pod(place.path(), "s")).await;
        let container = daemon.start(&sandbox, config).await;
        Some(Self { daemon, door: streams.door, sandbox, container, streams, place })
    }

    /// With a container that sleeps.
    pub async fn asleep(test: &str) -> Option<Self> {
        Self::with(test, container("c", "trap 'exit 0' TERM; while :; do sleep 0.1; done")).await
    }

    /// Where a script is met.
    pub async fn exec(&self, script: &str, [stdin, stdout, stderr, tty]: Flags) -> String {
        let cmd = ["/bin/sh", "-c", script].map(str::to_owned).to_vec();
        let container_id = self.container.clone();
        let request = cri::ExecRequest { container_id, cmd, tty, stdin, stdout, stderr };
        self.run(request).await
    }

    /// Where any command is met.
    pub async fn run(&self, request: cri::ExecRequest) -> String {
        met(self.daemon.calls.rpc.clone().exec(request).await.expect("prepared").into_inner().url)
    }

    /// Where the container is met.
    pub async fn attach(&self, [stdin, stdout, stderr, tty]: Flags) -> String {
        let request = cri::AttachRequest { container_id: self.container.clone(), stdin, tty, stdout, stderr };
        met(self.daemon.calls.rpc.clone().attach(request).await.expect("prepared").into_inner().url)
    }

    /// Where ports are met.
    pub async fn forward(&self, ports: &[u16]) -> String {
        let port = ports.iter().copied().map(i32::from).collect();
        let request = cri::PortForwardRequest { pod_sandbox_id: self.sandbox.clone(), port };
        met(self.daemon.calls.rpc.clone().port_forward(request).await.expect("prepared").into_inner().url)
    }

    /// Takes everything down; nothing is left.
    pub async fn end(self) {
        self.streams.end().await;
        self.daemon.remove(&self.sandbox).await;
        self.place.is_left_clean();
        self.daemon.stop.cancel();
    }
}

/// The path of a URL that is met in this process.
fn met(url: String) -> String {
    url.strip_prefix(IN_PROCESS).expect("met in this process").to_owned()
}
