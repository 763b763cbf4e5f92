//! Server port for exec, attach, and port forwarding through the CRI.
//!
//! Finds pods, containers, and sandboxes, and requests streaming URLs from the runtime.

use std::{
    path::Path,
    sync::{Arc, OnceLock},
};

use async_trait::async_trait;
use rustls::RootCertStore;
use rustls::pki_types::{CertificateDer, pem::PemObject};
use tonic::Code;

use crate::engine::PodReader;
use berth_cri::{CriError, RuntimeService};
use berth_ports::PodObserver;
use berth_proto::cri;
use berth_server::{
    ports::streams::{Sandbox, StreamError, StreamProvider, StreamSet},
    streaming::Tls,
};
use berth_sys::tls::ServerVerifier;
use berth_types::{ContainerId, Pod, SandboxId, observation::ObservedPod};

/// CA bundles of common distributions.
const AUTHORITIES: &[&str] = &[
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/cert.pem",
    "/etc/ssl/ca-bundle.pem",
];

/// Streams of a CRI runtime.
pub struct RuntimeStreams {
    pods: PodReader,
    observer: Arc<dyn PodObserver>,
    runtime: Arc<dyn RuntimeService>,
}

impl RuntimeStreams {
    /// Reads pods and their containers from the snapshots that the engine and PLEG publish.
    pub fn new(pods: PodReader, observer: Arc<dyn PodObserver>, runtime: Arc<dyn RuntimeService>) -> Self {
        Self { pods, observer, runtime }
    }

    /// Observed state of the pod; lists the runtime if that is not enough for the caller.
    async fn seen(&self, pod: &Pod, is_enough: impl Fn(&ObservedPod) -> bool) -> Option<Arc<ObservedPod>> {
        let known = self.observer.known_pod(pod.uid());
        if known.as_deref().is_some_and(&is_enough) {
            return known;
        }
        self.observer.list().await.ok()?.pods.remove(pod.uid())
    }
}

#[async_trait]
impl StreamProvider for RuntimeStreams {
    fn pod(&self, namespace: &str, name: &str) -> Option<Arc<Pod>> {
        self.pods.desired().iter().find(|pod| pod.name() == name && pod.namespace() == namespace).cloned()
    }

    async fn running(&self, pod: &Pod, container: &str) -> Option<ContainerId> {
        let of = |seen: &ObservedPod| seen.running().find(|c| &*c.name == container).map(|c| c.id.clone());
        of(&*self.seen(pod, |seen| of(seen).is_some()).await?)
    }

    async fn sandbox(&self, pod: &Pod) -> Sandbox {
        let Some(seen) = self.seen(pod, |seen| !seen.sandboxes.is_empty()).await else { return Sandbox::NotRunning };
        match seen.sandboxes.first() {
            Some(newest) => Sandbox::Newest(newest.id.clone()),
            None if seen.is_absent() => Sandbox::NotRunning,
            None => Sandbox::None,
        }
    }

    async fn exec(&self, id: &ContainerId, command: Vec<String>, set: StreamSet) -> Result<String, StreamError> {
        let StreamSet { stdin, stdout, stderr, tty } = set;
        let container_id = id.as_str().to_owned();
        let request = cri::ExecRequest { container_id, cmd: command, tty, stdin, stdout, stderr };
        self.runtime.exec(request).await.map_err(refused)
    }

    async fn attach(&self, id: &ContainerId, set: StreamSet) -> Result<String, StreamError> {
        let StreamSet { stdin, stdout, stderr, tty } = set;
        let request = cri::AttachRequest { container_id: id.as_str().to_owned(), stdin, tty, stdout, stderr };
        self.runtime.attach(request).await.map_err(refused)
    }

    async fn port_forward(&self, sandbox: &SandboxId, ports: &[u16]) -> Result<String, StreamError> {
        let port = ports.iter().copied().map(i32::from).collect();
        let request = cri::PortForwardRequest { pod_sandbox_id: sandbox.as_str().to_owned(), port };
        self.runtime.port_forward(request).await.map_err(refused)
    }

    async fn run(&self, id: &ContainerId, command: &[String]) -> Result<Vec<u8>, StreamError> {
        match self.runtime.exec_sync(id.as_str(), command, std::time::Duration::ZERO, usize::MAX).await {
            Ok(output) => Ok([output.stdout, output.stderr].concat()),
            // Unlike for streams, the code of a gRPC error is not needed here.
            Err(error) => Err(StreamError::Other(error.to_string())),
        }
    }
}

fn refused(error: CriError) -> StreamError {
    let text = error.to_string();
    match error {
        CriError::Rpc { code: Code::NotFound, .. } => StreamError::NotFound(text),
        CriError::Rpc { code: Code::ResourceExhausted, .. } => StreamError::Exhausted(text),
        _ => StreamError::Other(text),
    }
}

/// TLS configuration that verifies a runtime's `https` streaming server against the CA bundle of this machine. The
/// bundle is read when a runtime first needs it.
pub fn runtime_tls() -> Tls {
    let made = OnceLock::new();
    Arc::new(move || made.get_or_init(client_config).clone())
}

fn client_config() -> Arc<rustls::ClientConfig> {
    let path = AUTHORITIES.iter().map(Path::new).find(|path| path.exists());
    let known = path.into_iter().flat_map(|path| CertificateDer::pem_file_iter(path).into_iter().flatten().flatten());
    // Without a usable CA bundle every server is rejected.
    let builder = rustls::ClientConfig::builder();
    Arc::new(match ServerVerifier::new(RootCertStore::empty(), known) {
        Ok(verifier) => builder.dangerous().with_custom_certificate_verifier(Arc::new(verifier)).with_no_client_auth(),
        Err(_) => builder.with_root_certificates(RootCertStore::empty()).with_no_client_auth(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_runtime_refuses_keeps_its_words() {
        let rpc = |code| CriError::Rpc { code, message: "m".to_owned() };
        let rows = [
            (Code::NotFound, StreamError::NotFound("rpc error: code = NotFound desc = m".to_owned())),
            (
                Code::ResourceExhausted,
                StreamError::Exhausted("rpc error: code = ResourceExhausted desc = m".to_owned()),
            ),
            (Code::Unavailable, StreamError::Other("rpc error: code = Unavailable desc = m".to_owned())),
        ];
        for (code, expected) in rows {
            assert_eq!(refused(rpc(code)), expected);
        }
    }
}
