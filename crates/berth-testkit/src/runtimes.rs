//! Real runtimes as the agent's own clients meet them: a private containerd, and the embedded one in this process. The rooms
//! that talk to a runtime are tested once on each, by the same tests.

use std::{path::Path, time::Duration};

use berth_cri::{Connection, CriConfig, connect};
use berth_metrics::Registry;
use berth_proto::cri;

use super::{
    containerd::{self, Containerd},
    cri_calls,
    embedded::{
        in_process::{self, Daemon, daemon},
        place::{self, Place},
    },
    image::{Image, write_archive},
};

/// How long a call may take.
const LIMIT: Duration = Duration::from_secs(30);

/// Makes two tests of each.
#[macro_export]
macro_rules! on_real_runtimes {
    ($($name:ident)*) => {
        mod on_containerd {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $name() {
                super::$name($crate::runtimes::On::Containerd(stringify!($name))).await;
            })*
        }

        mod on_embedded {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $name() {
                super::$name($crate::runtimes::On::Embedded(stringify!($name))).await;
            })*
        }
    };
}

/// What a test runs on, by its name.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum On {
    /// A private containerd.
    Containerd(&'static str),
    /// Our own.
    Embedded(&'static str),
}

impl On {
    /// `None` where this machine cannot run it; says so.
    pub async fn runtime(self) -> Option<Runtime> {
        match self {
            Self::Containerd(test) => containerd::start_or_skip(test).map(Runtime::Containerd),
            Self::Embedded(test) if place::skips(test) => None,
            Self::Embedded(_) => {
                let place = Place::new();
                Some(Runtime::Embedded(Box::new(daemon(place.path()).await), place))
            }
        }
    }
}

/// A runtime with busybox. What a test leaves in it goes with it.
pub enum Runtime {
    /// A process of its own.
    Containerd(Containerd),
    /// In this one.
    Embedded(Box<Daemon>, Place),
}

impl Drop for Runtime {
    fn drop(&mut self) {
        if let Self::Embedded(daemon, _) = self {
            daemon.stop.cancel();
        }
    }
}

impl Runtime {
    /// The agent's clients of it.
    pub fn connection(&self, registry: &Registry) -> Connection {
        match self {
            Self::Containerd(containerd) => {
                let (endpoint, image_endpoint) = (containerd.endpoint(), String::new());
                let config = CriConfig { endpoint, image_endpoint, request_timeout: LIMIT, list_streaming: true };
                connect(&config, registry).expect("an endpoint")
            }
            Self::Embedded(daemon, _) => daemon.connection(registry),
        }
    }

    /// A folder that goes with it.
    pub fn dir(&self) -> &Path {
        match self {
            Self::Containerd(containerd) => containerd.dir(),
            Self::Embedded(_, place) => place.path(),
        }
    }

    /// Imports images.
    pub async fn import(&self, images: &[Image<'_>]) {
        match self {
            Self::Containerd(containerd) => containerd.import(images),
            Self::Embedded(daemon, place) => {
                let archive = place.path().join("more.tar");
                write_archive(images, &archive).expect("written");
                daemon.images.import(&archive, None).await.expect("imported");
            }
        }
    }

    /// A pod on this machine's network.
    pub fn pod(&self, name: &str) -> cri::PodSandboxConfig {
        match self {
            Self::Containerd(containerd) => {
                let network = cri::NamespaceMode::Node.into();
                let namespaces = cri::NamespaceOption { network, ..Default::default() };
                let log_directory = containerd.dir().join("logs").display().to_string();
                cri::PodSandboxConfig { log_directory, ..cri_calls::sandbox(name, namespaces) }
            }
            Self::Embedded(_, place) => in_process::pod(place.path(), name),
        }
    }
}
