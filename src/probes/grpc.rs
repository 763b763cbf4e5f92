//! gRPC probe: calls `grpc.health.v1.Health/Check`.
//!
//! Implements spec 05 §1.7.

use std::{pin::pin, time::Duration};

use hyper_util::rt::TokioIo;
use tokio::time::{Instant, sleep, timeout_at};
use tonic::{
    Code,
    transport::{Channel, Endpoint},
};

use super::{
    connector::{PodConnector, Spawner},
    outcome::Outcome,
    target::{joined, user_agent},
};
use berth_config::GoDuration;
use berth_cri::CriError;
use berth_proto::health::{HealthCheckRequest, health_check_response::ServingStatus, health_client::HealthClient};

/// Delay between connection attempts, as in gRPC's own clients.
const BETWEEN_DIALS: Duration = Duration::from_secs(1);
/// Maximum size of a response in bytes; it contains one number.
const MOST_ANSWER: usize = 64 << 10;

/// Checks the health of a server, or of one of its services. Never returns an error: an unreachable server is a
/// failure.
pub async fn probe(dialler: PodConnector<'_>, host: &str, port: u16, service: &str, timeout: Duration) -> Outcome {
    let deadline = Instant::now() + timeout;
    let address = joined(host, port);
    let limit = go(timeout);
    let (spawner, _guard) = Spawner::new();
    let endpoint = match Endpoint::from_shared(format!("http://{address}")).and_then(|e| e.user_agent(user_agent())) {
        Ok(endpoint) => endpoint.executor(spawner),
        Err(error) => {
            return Outcome::Failure(format!("error: failed to connect service at {address:?}: {error}"));
        }
    };
    let Some(channel) = connect(dialler, &endpoint, host, port, deadline).await else {
        return Outcome::Failure(format!(
            "timeout: failed to connect service {address:?} within {limit}: context deadline exceeded"
        ));
    };
    let mut client = HealthClient::new(channel).max_decoding_message_size(MOST_ANSWER);
    let ask = HealthCheckRequest { service: service.to_owned() };
    let late = || Outcome::Failure(format!("timeout: health rpc did not complete within {limit}"));
    match timeout_at(deadline, pin!(client.check(ask))).await {
        Err(_) => late(),
        Ok(Ok(answer)) => match answer.into_inner().status() {
            ServingStatus::Serving => Outcome::Success,
            other => Outcome::Failure(format!("service unhealthy (responded with {:?})", other.as_str_name())),
        },
        Ok(Err(status)) => match status.code() {
            Code::DeadlineExceeded => late(),
            Code::Unimplemented => Outcome::Failure(format!(
                "error: this server does not implement the grpc health protocol (grpc.health.v1.Health): {}",
                status.message()
            )),
            _ => Outcome::Failure(format!("error: health rpc probe failed: {}", CriError::from(status))),
        },
    }
}

/// Connects; retries until the deadline.
async fn connect(
    dialler: PodConnector<'_>,
    endpoint: &Endpoint,
    host: &str,
    port: u16,
    deadline: Instant,
) -> Option<Channel> {
    loop {
        if let Ok(stream) = dialler.tcp_nodelay(host, port, deadline).await {
            let mut stream = Some(TokioIo::new(stream));
            let once = tower::service_fn(move |_: http::Uri| {
                let taken = stream.take().ok_or_else(|| std::io::Error::other("connection closed"));
                async move { taken }
            });
            let made = pin!(endpoint.connect_with_connector(once));
            if let Ok(made) = timeout_at(deadline, made).await.ok()? {
                return Some(made);
            }
        }
        timeout_at(deadline, sleep(BETWEEN_DIALS)).await.ok()?;
    }
}

/// Duration in Go's format.
pub fn go(duration: Duration) -> GoDuration {
    GoDuration::from_secs(i64::try_from(duration.as_secs()).unwrap_or(i64::MAX))
}
