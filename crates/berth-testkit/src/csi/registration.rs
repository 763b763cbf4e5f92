//! Fake plugin registration socket for the plugin watcher, with optional misbehavior.

use std::{
    fs,
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
    time::Duration,
};

use tokio::{io::AsyncWriteExt, net::UnixListener, sync::watch, task::JoinHandle};
use tokio_stream::wrappers::UnixListenerStream;
use tonic::{Request, Response, Status, transport::Server};

use berth_proto::plugin_registration::{
    InfoRequest, PluginInfo, RegistrationStatus, RegistrationStatusResponse,
    registration_server::{Registration, RegistrationServer},
};

use super::lock;

/// Recorded registration call.
#[derive(Clone, Debug, PartialEq)]
pub enum RegistrationCall {
    /// `GetInfo`.
    Info,
    /// `NotifyRegistrationStatus`: registered.
    Registered,
    /// `NotifyRegistrationStatus`: not registered, with the error.
    Refused(String),
}

/// Behavior of the registration service.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum RegistrationBehavior {
    /// Conforming.
    Good,
    /// Accepts connections and never answers `GetInfo`.
    Silent,
    /// Sends bytes that are not HTTP/2.
    Garbage,
    /// Answers `GetInfo`, and fails `NotifyRegistrationStatus`.
    Deaf,
}

#[derive(Clone)]
struct Service {
    info: PluginInfo,
    manners: RegistrationBehavior,
    asked: Arc<Mutex<Vec<RegistrationCall>>>,
    moved: watch::Sender<u64>,
}

impl Service {
    fn note(&self, asked: RegistrationCall) {
        lock(&self.asked).push(asked);
        self.moved.send_modify(|times| *times += 1);
    }
}

#[tonic::async_trait]
impl Registration for Service {
    async fn get_info(&self, _: Request<InfoRequest>) -> Result<Response<PluginInfo>, Status> {
        self.note(RegistrationCall::Info);
        if self.manners == RegistrationBehavior::Silent {
            std::future::pending::<()>().await;
        }
        Ok(Response::new(self.info.clone()))
    }

    async fn notify_registration_status(
        &self,
        request: Request<RegistrationStatus>,
    ) -> Result<Response<RegistrationStatusResponse>, Status> {
        let status = request.into_inner();
        self.note(if status.plugin_registered {
            RegistrationCall::Registered
        } else {
            RegistrationCall::Refused(status.error)
        });
        if self.manners == RegistrationBehavior::Deaf {
            return Err(Status::internal("deaf"));
        }
        Ok(Response::new(RegistrationStatusResponse {}))
    }
}

/// Plugin with a registration socket; drop removes the socket.
pub struct Plugin {
    socket: PathBuf,
    service: Service,
    task: JoinHandle<()>,
}

impl Plugin {
    /// Starts a conforming CSI plugin that serves at `endpoint`.
    pub fn csi(socket: &Path, name: &str, endpoint: &Path, versions: &[&str]) -> Self {
        Self::start(socket, "CSIPlugin", name, endpoint.display().to_string(), versions, RegistrationBehavior::Good)
    }

    /// Starts a plugin of any type and behavior.
    pub fn start(
        socket: &Path,
        kind: &str,
        name: &str,
        endpoint: String,
        versions: &[&str],
        manners: RegistrationBehavior,
    ) -> Self {
        let info = PluginInfo {
            r#type: kind.to_owned(),
            name: name.to_owned(),
            endpoint,
            supported_versions: versions.iter().map(|version| (*version).to_owned()).collect(),
        };
        let service = Service { info, manners, asked: Arc::default(), moved: watch::Sender::new(0) };
        if let Some(directory) = socket.parent() {
            fs::create_dir_all(directory).expect("failed to create directory");
        }
        let _ = fs::remove_file(socket); // there is none at first
        let listener = UnixListener::bind(socket).expect("failed to listen on the socket");
        let serving = service.clone();
        let task = tokio::spawn(async move {
            if manners == RegistrationBehavior::Garbage {
                loop {
                    let (mut stream, _) = listener.accept().await.expect("accepted");
                    serving.note(RegistrationCall::Info);
                    let _ = stream.write_all(&[0xAA; 4096]).await; // the client may have closed already
                }
            }
            let incoming = UnixListenerStream::new(listener);
            Server::builder()
                .add_service(RegistrationServer::new(serving))
                .serve_with_incoming(incoming)
                .await
                .expect("served");
        });
        Self { socket: socket.to_owned(), service, task }
    }

    /// All recorded registration calls.
    pub fn asked(&self) -> Vec<RegistrationCall> {
        lock(&self.service.asked).clone()
    }

    /// Waits until `holds` returns true for the recorded calls.
    ///
    /// # Panics
    /// The condition is not met within 60 seconds.
    pub async fn until(&self, what: &str, holds: impl Fn(&[RegistrationCall]) -> bool) {
        let mut moved = self.service.moved.subscribe();
        let waiting = async {
            while !holds(&self.asked()) {
                moved.changed().await.expect("the registration server has ended");
            }
        };
        let limit = Duration::from_secs(60);
        if tokio::time::timeout(limit, waiting).await.is_err() {
            panic!("timed out after {limit:?} waiting for: {what}; calls: {:?}", self.asked());
        }
    }

    /// Waits until the plugin is registered.
    pub async fn registered(&self) {
        self.until("registered", |asked| asked.contains(&RegistrationCall::Registered)).await;
    }

    /// Waits until registration is refused; returns the error.
    pub async fn refused(&self) -> String {
        let is_refusal = |asked: &RegistrationCall| matches!(asked, RegistrationCall::Refused(_));
        self.until("refused", |asked| asked.iter().any(is_refusal)).await;
        let found = self.asked().into_iter().find_map(|asked| match asked {
            RegistrationCall::Refused(text) => Some(text),
            _ => None,
        });
        found.unwrap_or_default()
    }
}

impl Drop for Plugin {
    fn drop(&mut self) {
        self.task.abort();
        let _ = fs::remove_file(&self.socket); // its directory may be gone
    }
}
