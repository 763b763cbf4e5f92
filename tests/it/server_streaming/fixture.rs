//! Fixture: streaming endpoints in front of a scripted or embedded runtime with one pod.

use std::sync::Arc;

use berth::serving::embedded_streams::RuntimeTargets;
use berth_cri::RuntimeService;
use berth_metrics::{Registry, exposition::ExpositionFormat};
use berth_ports::SystemClock;
use berth_proto::cri;
use berth_runtime::streams::IN_PROCESS;
use berth_server::streaming::StreamingConfig;
use serde_json::json;
use tokio::time::timeout;

use berth_testkit::{
    embedded::{
        cleanup,
        fixture::{self, RuntimeFixture},
        in_process::{self, Daemon, daemon},
    },
    image::BUSYBOX,
    pods,
    scripted_cri::{ScriptedCri, streaming::StreamServer},
    streams::{
        clients::{LIMIT, StreamEndpoint, all, words},
        endpoints::{Endpoints, start},
    },
};

/// Exec path of the pod's only container.
pub const EXEC: &str = "/exec/default/web/c";

/// Generates two tests of each function, one per runtime.
macro_rules! on_both_runtimes {
    ($($name:ident)*) => {
        mod scripted {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $name() {
                super::$name($crate::server_streaming::fixture::RuntimeKind::Scripted).await;
            })*
        }

        mod embedded {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $name() {
                super::$name($crate::server_streaming::fixture::RuntimeKind::Embedded(stringify!($name))).await;
            })*
        }
    };
}

/// Runtime of a test.
#[derive(Clone, Copy)]
pub enum RuntimeKind {
    /// The scripted runtime, with a streaming server.
    Scripted,
    /// The embedded runtime; the string is the test's name.
    Embedded(&'static str),
}

/// Whether the pod's container has a terminal.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Terminal {
    /// With a terminal.
    Given,
    /// Without a terminal.
    None,
}

impl RuntimeKind {
    /// Starts the fixture; `None`, with a report, if this machine cannot run it.
    pub async fn world(self) -> Option<Fixture> {
        self.with(StreamingConfig::default(), Terminal::None).await
    }

    /// Like [`RuntimeKind::world`], with settings.
    pub async fn with(self, config: StreamingConfig, terminal: Terminal) -> Option<Fixture> {
        match self {
            Self::Scripted => Some(Fixture::scripted(config, terminal).await),
            Self::Embedded(test) if fixture::skips(test) => None,
            Self::Embedded(_) => Some(Fixture::embedded(config, terminal).await),
        }
    }
}

/// A runtime, and the endpoints in front of it.
pub struct Fixture {
    /// Client of the endpoints.
    pub endpoint: StreamEndpoint,
    /// The endpoints.
    pub ends: Endpoints,
    /// The runtime behind them.
    pub below: RuntimeUnderTest,
}

/// A runtime with one pod, `web`, and its container `c`.
pub enum RuntimeUnderTest {
    /// The scripted runtime.
    Scripted {
        /// Its record of calls.
        cri: Arc<ScriptedCri>,
        /// Its streaming server.
        server: StreamServer,
    },
    /// The embedded runtime.
    Embedded(Box<EmbeddedRuntime>),
}

/// An embedded runtime and its directory.
pub struct EmbeddedRuntime {
    daemon: Daemon,
    /// Metrics of its CRI calls.
    calls: Registry,
    sandbox: String,
    place: RuntimeFixture,
}

impl Fixture {
    async fn scripted(config: StreamingConfig, terminal: Terminal) -> Self {
        let cri = ScriptedCri::new(Arc::new(SystemClock));
        let server = StreamServer::start(&cri).await;
        let ends = serve(&cri, config, terminal).await;
        Self { endpoint: ends.endpoint, ends, below: RuntimeUnderTest::Scripted { cri, server } }
    }

    async fn embedded(config: StreamingConfig, terminal: Terminal) -> Self {
        let place = RuntimeFixture::new();
        let daemon = daemon(place.path()).await;
        let calls = Registry::new();
        let runtime = daemon.connection(&calls).runtime;
        let tty = terminal == Terminal::Given;
        let pod = pods::pod("web", json!({"containers": [{"name": "c", "tty": tty}]}));
        let container = cri::ContainerConfig { stdin: true, tty, ..in_process::container("c", "exec cat") };
        let seen = start(&*runtime, &pod, in_process::pod(place.path(), "web"), container).await;
        let sandbox = seen.sandboxes[0].id.as_str().to_owned();
        let ends = Endpoints::serve(runtime, pod, seen, config).await;
        ends.streaming.serve_here(IN_PROCESS, Arc::new(RuntimeTargets(daemon.runtime.clone())));
        Self {
            endpoint: ends.endpoint,
            ends,
            below: RuntimeUnderTest::Embedded(Box::new(EmbeddedRuntime { daemon, calls, sandbox, place })),
        }
    }

    /// Number of streams that the runtime was requested to prepare.
    pub fn prepared(&self) -> usize {
        const CALLS: [&str; 3] = ["exec", "attach", "port_forward"];
        match &self.below {
            RuntimeUnderTest::Scripted { cri, .. } => {
                cri.calls().iter().filter(|call| CALLS.contains(&call.op)).count()
            }
            RuntimeUnderTest::Embedded(own) => {
                let mut page = Vec::new();
                ExpositionFormat::negotiate(None).encode(own.calls.gather(), &mut page);
                let page = String::from_utf8(page).expect("text");
                let series = CALLS.map(|call| format!("kubelet_runtime_operations_total{{operation_type=\"{call}\"}}"));
                page.lines().filter(|line| series.iter().any(|series| line.starts_with(series))).count()
            }
        }
    }

    /// A command that runs until [`Fixture::runtime_dies`].
    pub fn last_words(&self) -> String {
        match self.below {
            RuntimeUnderTest::Scripted { .. } => words(&["vanish"]),
            RuntimeUnderTest::Embedded(_) => words(&["sleep", "1000"]),
        }
    }

    /// Kills the process that owns the pod: the shim of an embedded runtime.
    pub fn runtime_dies(&self) {
        if let RuntimeUnderTest::Embedded(own) = &self.below {
            let folder = own.place.path().join("state/s").join(&own.sandbox);
            cleanup::end(cleanup::shim_of(&folder).expect("a shim"));
        }
    }

    /// Stops and removes everything; asserts that nothing is left behind.
    pub async fn end(self) {
        if let RuntimeUnderTest::Embedded(own) = self.below {
            own.daemon.remove(&own.sandbox).await;
            own.place.assert_clean();
            own.daemon.stop.cancel();
        }
    }
}

/// Serves the endpoints in front of a scripted runtime with one pod, `web`.
pub async fn serve(cri: &Arc<ScriptedCri>, config: StreamingConfig, terminal: Terminal) -> Endpoints {
    let pod = pods::pod("web", json!({"containers": [{"name": "c", "tty": terminal == Terminal::Given}]}));
    let meta =
        cri::PodSandboxMetadata { name: "web".into(), uid: "uid-web".into(), namespace: "default".into(), attempt: 0 };
    let sandbox = cri::PodSandboxConfig { metadata: Some(meta), ..Default::default() };
    let container = cri::ContainerConfig {
        metadata: Some(cri::ContainerMetadata { name: "c".into(), attempt: 0 }),
        image: Some(cri::ImageSpec { image: BUSYBOX.into(), ..Default::default() }),
        ..Default::default()
    };
    let seen = start(&**cri, &pod, sandbox, container).await;
    Endpoints::serve(cri.clone() as Arc<dyn RuntimeService>, pod, seen, config).await
}

/// Runs a command with v4, without stdin; returns its output and status.
pub async fn command(endpoint: &StreamEndpoint, arguments: &[&str]) -> (String, String) {
    let client = endpoint.spdy(&format!("{EXEC}?output=1{}", words(arguments)), &["v4.channel.k8s.io"]).await;
    let mut error = client.stream("error").await;
    let mut stdout = client.stream("stdout").await;
    let printed = all(&mut stdout).await;
    let status = all(&mut error).await;
    client.connection.close();
    timeout(LIMIT, client.task).await.expect("in time").expect("no panic");
    (printed, status)
}

/// Whether a status is Success without a message: older runtimes write more fields.
pub fn is_success(status: &str) -> bool {
    let parsed: serde_json::Value = serde_json::from_str(status).unwrap_or_default();
    parsed["status"] == "Success" && parsed.get("message").is_none()
}
