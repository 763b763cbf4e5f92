//! Fixture: a runtime with a running container, and its streaming listener.

use std::sync::Arc;

use berth::serving::embedded_streams::RuntimeTargets;
use berth_proto::cri;
use berth_runtime::{runtime::Runtime, streams::IN_PROCESS};
use berth_server::streaming::server::listener::BoundListener;
use tokio::{task::JoinHandle, time::timeout};
use tokio_util::sync::CancellationToken;

use berth_testkit::{
    embedded::{
        fixture::{RuntimeFixture, skips},
        in_process::{Daemon, container, daemon, pod},
    },
    streams::clients::{LIMIT, StreamEndpoint},
};

/// Flags of a request: stdin, stdout, stderr, terminal.
pub type Flags = [bool; 4];
/// All streams, without a terminal.
pub const ALL: Flags = [true, true, true, false];
/// All streams of a terminal.
pub const TERMINAL: Flags = [true, true, false, true];
/// stdout only.
pub const READS: Flags = [false, true, false, false];
/// Success status.
pub const SUCCESS: &str = r#"{"metadata":{},"status":"Success"}"#;

/// Failure status of a command with that exit code.
pub fn exit_status(code: u8) -> String {
    format!(
        r#"{{"metadata":{{}},"status":"Failure","message":"command terminated with non-zero exit code: exit status {code}","reason":"NonZeroExitCode","details":{{"causes":[{{"reason":"ExitCode","message":"{code}"}}]}}}}"#
    )
}

/// A streaming listener of a runtime.
pub struct Streams {
    /// Client of the listener.
    pub endpoint: StreamEndpoint,
    /// Base URL of the streams.
    pub url: String,
    /// Stops the listener.
    pub stop: CancellationToken,
    task: JoinHandle<()>,
}

impl Streams {
    /// Starts a listener of a runtime.
    pub async fn of(runtime: &Arc<Runtime>) -> Self {
        let listening = BoundListener::bind("127.0.0.1:0").await.expect("a port");
        let url = listening.url();
        let endpoint = StreamEndpoint(url.strip_prefix("http://").expect("http").parse().expect("an address"));
        let stop = CancellationToken::new();
        let task = tokio::spawn(listening.serve(Arc::new(RuntimeTargets(runtime.clone())), stop.clone()));
        Self { endpoint, url, stop, task }
    }

    /// Stops the listener and waits for its end.
    pub async fn end(self) {
        self.stop.cancel();
        timeout(LIMIT, self.task).await.expect("in time").expect("no panic");
    }
}

/// A runtime with a running container, and a client of its streams.
pub struct Fixture {
    /// The runtime.
    pub daemon: Daemon,
    /// Client of the streaming listener.
    pub endpoint: StreamEndpoint,
    /// Sandbox id.
    pub sandbox: String,
    /// Container id.
    pub container: String,
    streams: Streams,
    place: RuntimeFixture,
}

impl Fixture {
    /// Starts a runtime and a container; `None`, with a report, if the test is skipped.
    pub async fn with(test: &str, config: cri::ContainerConfig) -> Option<Self> {
        if skips(test) {
            return None;
        }
        let place = RuntimeFixture::new();
        let daemon = daemon(place.path()).await;
        let streams = Streams::of(&daemon.runtime).await;
        let sandbox = daemon.run(pod(place.path(), "s")).await;
        let container = daemon.start(&sandbox, config).await;
        Some(Self { daemon, endpoint: streams.endpoint, sandbox, container, streams, place })
    }

    /// Like [`Fixture::with`], with a sleeping container.
    pub async fn asleep(test: &str) -> Option<Self> {
        Self::with(test, container("c", "trap 'exit 0' TERM; while :; do sleep 0.1; done")).await
    }

    /// Stream path of an exec of a shell script.
    pub async fn exec(&self, script: &str, [stdin, stdout, stderr, tty]: Flags) -> String {
        let cmd = ["/bin/sh", "-c", script].map(str::to_owned).to_vec();
        let container_id = self.container.clone();
        let request = cri::ExecRequest { container_id, cmd, tty, stdin, stdout, stderr };
        self.run(request).await
    }

    /// Stream path of any exec request.
    pub async fn run(&self, request: cri::ExecRequest) -> String {
        met(self.daemon.calls.rpc.clone().exec(request).await.expect("prepared").into_inner().url)
    }

    /// Stream path of an attach.
    pub async fn attach(&self, [stdin, stdout, stderr, tty]: Flags) -> String {
        let request = cri::AttachRequest { container_id: self.container.clone(), stdin, tty, stdout, stderr };
        met(self.daemon.calls.rpc.clone().attach(request).await.expect("prepared").into_inner().url)
    }

    /// Stream path of a port-forward.
    pub async fn forward(&self, ports: &[u16]) -> String {
        let port = ports.iter().copied().map(i32::from).collect();
        let request = cri::PortForwardRequest { pod_sandbox_id: self.sandbox.clone(), port };
        met(self.daemon.calls.rpc.clone().port_forward(request).await.expect("prepared").into_inner().url)
    }

    /// Stops and removes everything; asserts that nothing is left behind.
    pub async fn end(self) {
        self.streams.end().await;
        self.daemon.remove(&self.sandbox).await;
        self.place.assert_clean();
        self.daemon.stop.cancel();
    }
}

/// Path of an in-process stream URL.
fn met(url: String) -> String {
    url.strip_prefix(IN_PROCESS).expect("met in this process").to_owned()
}
