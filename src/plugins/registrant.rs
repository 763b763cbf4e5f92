//! Client of a plugin's registration service. Spec 06c §2.

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use tonic::transport::Channel;

use berth_cri::plugin_socket::{self, limited, truncated};
use berth_ports::PluginInfo;
use berth_proto::plugin_registration::{InfoRequest, RegistrationStatus, registration_client::RegistrationClient};

/// Timeout of `GetInfo`.
const INFO: Duration = Duration::from_secs(1);
/// Timeout of `NotifyRegistrationStatus`.
const NOTIFY: Duration = Duration::from_secs(5);
/// Maximum size of a message from the plugin, in bytes.
const MESSAGE: usize = 64 << 10;

/// Connection to a plugin's registration service.
pub struct Registrant {
    client: RegistrationClient<Channel>,
    socket: PathBuf,
}

impl Registrant {
    /// Connects to the socket. Retries for 10 s while it is missing or nobody listens.
    ///
    /// # Errors
    /// No connection within the timeout, or the path is not a socket.
    pub async fn dial(socket: &Path) -> Result<Self, String> {
        let connection = plugin_socket::dial(socket).await.map_err(|error| {
            let cause = if error.cause().is_empty() { "context deadline exceeded" } else { error.cause() };
            format!("RegisterPlugin error -- dial failed at socket {}, err: {cause}", socket.display())
        })?;
        let client = RegistrationClient::new(connection.channel).max_decoding_message_size(MESSAGE);
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
        let error = outcome.err().map(truncated).unwrap_or_default().to_owned();
        let status = RegistrationStatus { plugin_registered: outcome.is_ok(), error };
        limited(NOTIFY, self.client.notify_registration_status(status)).await.map(drop).map_err(String::from)
    }
}

#[cfg(test)]
mod tests {
    use std::{
        fs,
        os::unix::{fs::symlink, net::UnixListener},
    };

    use super::*;

    /// A plugin may replace its socket by a link after the walk: the agent does not follow it.
    #[tokio::test]
    async fn links_and_files_are_refused_at_once() {
        let directory = tempfile::tempdir().expect("a directory");
        let at = |name: &str| directory.path().join(name);
        let _listener = UnixListener::bind(at("plugin.sock")).expect("bound");
        symlink("plugin.sock", at("link.sock")).expect("linked");
        fs::write(at("file.sock"), "").expect("written");
        for name in ["link.sock", "file.sock"] {
            let socket = at(name);
            let error = Registrant::dial(&socket).await.err();
            let text = format!("RegisterPlugin error -- dial failed at socket {}, err: not a socket", socket.display());
            assert_eq!(error, Some(text));
        }
        assert!(Registrant::dial(&at("plugin.sock")).await.is_ok());
    }

    #[tokio::test(start_paused = true)]
    async fn a_missing_socket_is_waited_for_until_the_timeout() {
        let socket = Path::new("/nowhere/plugin.sock");
        let error = Registrant::dial(socket).await.err();
        let text = "RegisterPlugin error -- dial failed at socket /nowhere/plugin.sock, err: No such file or directory \
                    (os error 2)";
        assert_eq!(error, Some(text.to_owned()));
    }
}
