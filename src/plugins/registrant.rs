//! Client of a plugin's registration service. Spec 06c §2.

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use hyper_util::rt::TokioIo;
use tokio::{
    net::UnixStream,
    time::{sleep, timeout},
};
use tonic::transport::{Channel, Endpoint};

use berth_cri::CriError;
use berth_ports::PluginInfo;
use berth_proto::plugin_registration::{InfoRequest, RegistrationStatus, registration_client::RegistrationClient};
use berth_sys::backoff::Backoff;

/// Timeout of connecting: the socket exists before its owner listens.
const DIAL: Duration = Duration::from_secs(10);
/// Delays between connection attempts.
const BACKOFF: Backoff = Backoff::new(Duration::from_millis(10), Duration::from_millis(500));
/// Timeout of `GetInfo`.
const INFO: Duration = Duration::from_secs(1);
/// Timeout of `NotifyRegistrationStatus`.
const NOTIFY: Duration = Duration::from_secs(5);
/// Maximum size of a message from the plugin, in bytes.
const MESSAGE: usize = 64 << 10;
/// Maximum length of a text from the plugin that is logged or passed on, in bytes.
const TEXT: usize = 1 << 10;

/// Connection to a plugin's registration service.
pub struct Registrant {
    client: RegistrationClient<Channel>,
    socket: PathBuf,
}

impl Registrant {
    /// Connects to the socket, with retries.
    ///
    /// # Errors
    /// No connection within the timeout.
    pub async fn dial(socket: &Path) -> Result<Self, String> {
        let mut cause = "context deadline exceeded".to_owned();
        let connecting = async {
            let mut backoff = BACKOFF;
            loop {
                match connect(socket).await {
                    Ok(channel) => return channel,
                    Err(error) => cause = error,
                }
                sleep(backoff.next_delay()).await;
            }
        };
        let channel = timeout(DIAL, connecting)
            .await
            .map_err(|_| format!("RegisterPlugin error -- dial failed at socket {}, err: {cause}", socket.display()))?;
        let client = RegistrationClient::new(channel).max_decoding_message_size(MESSAGE);
        Ok(Self { client, socket: socket.to_owned() })
    }

    /// Calls `GetInfo`.
    ///
    /// # Errors
    /// The call fails or times out.
    pub async fn info(&mut self) -> Result<PluginInfo, String> {
        let answer = limited(INFO, self.client.get_info(InfoRequest {})).await;
        let info = answer.map_err(|error| {
            let socket = self.socket.display();
            format!(
                "RegisterPlugin error -- failed to get plugin info using RPC GetInfo at socket {socket}, err: {error}"
            )
        })?;
        let endpoint = if info.endpoint.is_empty() { self.socket.clone() } else { info.endpoint.into() };
        Ok(PluginInfo {
            kind: info.r#type,
            name: info.name,
            endpoint,
            versions: info.supported_versions,
            socket: self.socket.clone(),
        })
    }

    /// Calls `NotifyRegistrationStatus` with the outcome.
    ///
    /// # Errors
    /// The call fails or times out.
    pub async fn notify(&mut self, outcome: Result<(), &str>) -> Result<(), String> {
        let error = outcome.err().map(cut).unwrap_or_default().to_owned();
        let status = RegistrationStatus { plugin_registered: outcome.is_ok(), error };
        limited(NOTIFY, self.client.notify_registration_status(status)).await.map(drop)
    }
}

/// Truncates a text to the maximum length.
pub fn cut(text: &str) -> &str {
    let end = (0..=TEXT.min(text.len())).rev().find(|end| text.is_char_boundary(*end));
    end.and_then(|end| text.get(..end)).unwrap_or(text)
}

async fn limited<T>(
    limit: Duration,
    call: impl Future<Output = Result<tonic::Response<T>, tonic::Status>>,
) -> Result<T, String> {
    match timeout(limit, call).await {
        Ok(Ok(answer)) => Ok(answer.into_inner()),
        Ok(Err(status)) => Err(cut(&CriError::from(status).to_string()).to_owned()),
        Err(_) => Err("rpc error: code = DeadlineExceeded desc = context deadline exceeded".to_owned()),
    }
}

async fn connect(socket: &Path) -> Result<Channel, String> {
    let stream = UnixStream::connect(socket).await.map_err(|error| error.to_string())?;
    let mut stream = Some(TokioIo::new(stream));
    // One connection is sufficient for these calls; after it is lost the registration starts again.
    let once = tower::service_fn(move |_: http::Uri| {
        let taken = stream.take().ok_or_else(|| std::io::Error::from(std::io::ErrorKind::NotConnected));
        async move { taken }
    });
    let endpoint = Endpoint::from_static("http://localhost");
    endpoint.connect_with_connector(once).await.map_err(|error| error.to_string())
}
