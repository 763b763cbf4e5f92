//! systemd-logind D-Bus client: inhibitor locks and shutdown signals.
//!
//! Implements spec 05 §7.2.

use std::{
    collections::HashMap,
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    time::Duration,
};

use tokio::{net::UnixStream, time::timeout};
use tokio_stream::StreamExt;
use zbus::{
    Connection, DynamicType, MatchRule, Message, MessageStream, OwnedVariant, connection::Builder, message::Type,
};

/// Socket of the system bus, unless the environment names another.
const BUS: &str = "/run/dbus/system_bus_socket";
const BUS_ADDRESS: &str = "DBUS_SYSTEM_BUS_ADDRESS";
const LOGIND: Service = Service {
    name: "org.freedesktop.login1",
    object: "/org/freedesktop/login1",
    interface: "org.freedesktop.login1.Manager",
};
const SYSTEMD: Service = Service {
    name: "org.freedesktop.systemd1",
    object: "/org/freedesktop/systemd1",
    interface: "org.freedesktop.systemd1.Manager",
};
const PROPERTIES: &str = "org.freedesktop.DBus.Properties";
/// Timeouts of the connection and of a reply.
const CONNECT: Duration = Duration::from_secs(10);
const ANSWER: Duration = Duration::from_secs(15);
const HANGUP: i32 = 1;

/// logind is unavailable or a call failed.
#[derive(Debug, thiserror::Error)]
pub enum LogindError {
    /// The connection failed.
    #[error("failed to connect to D-Bus at {at}: {cause}")]
    Bus {
        /// Path of the bus socket.
        at: String,
        /// Cause of the failure.
        cause: String,
    },
    /// logind returned an error, or the connection was lost.
    #[error("{what}: {cause}")]
    Call {
        /// Called method or read property.
        what: &'static str,
        /// Cause of the failure.
        cause: String,
    },
    /// The connection was lost: no further signals arrive.
    #[error("the D-Bus connection is lost")]
    Lost,
}

struct Service {
    name: &'static str,
    object: &'static str,
    interface: &'static str,
}

/// Address of logind: the bus socket.
#[derive(Clone, Debug)]
pub struct Logind(PathBuf);

/// A connection for method calls and properties.
pub struct Session(Connection);

/// Shutdown signals of logind on a connection.
pub struct Signals {
    ends: MessageStream,
    /// Additional signal with metadata, in releases of systemd that send it.
    details: MessageStream,
}

/// A shutdown signal of logind.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum ShutdownSignal {
    /// A shutdown begins (true) or is cancelled (false).
    InProgress(bool),
    /// Kind of shutdown: `reboot`, `power-off`, `soft-reboot`, …
    Kind(String),
}

/// Maximum length of the kind of shutdown, characters.
const HOW: usize = 64;

impl Logind {
    /// logind of this machine.
    pub fn of_this_machine() -> Self {
        let named = std::env::var(BUS_ADDRESS).ok();
        let socket = named.as_deref().and_then(socket);
        Self(socket.unwrap_or_else(|| PathBuf::from(BUS)))
    }

    /// logind on the bus at that socket.
    pub fn on(socket: &Path) -> Self {
        Self(socket.to_owned())
    }

    /// Connects and subscribes to the shutdown signals.
    ///
    /// # Errors
    /// If there is no bus.
    pub async fn connect(&self) -> Result<(Session, Signals), LogindError> {
        let failed = |cause: String| LogindError::Bus { at: self.0.display().to_string(), cause };
        let connecting = async {
            let stream = UnixStream::connect(&self.0).await.and_then(UnixStream::into_std);
            let stream = stream.map_err(|error| failed(error.to_string()))?;
            let connection = Builder::unix_stream(stream).build().await.map_err(|error| failed(error.to_string()))?;
            let ends = listen(&connection, "PrepareForShutdown").await.map_err(|error| failed(error.to_string()))?;
            let details = listen(&connection, "PrepareForShutdownWithMetadata").await;
            let details = details.map_err(|error| failed(error.to_string()))?;
            Ok((Session(connection), Signals { ends, details }))
        };
        timeout(CONNECT, connecting).await.unwrap_or_else(|_| Err(failed(format!("no response within {CONNECT:?}"))))
    }
}

async fn listen(connection: &Connection, member: &'static str) -> zbus::Result<MessageStream> {
    let rule = MatchRule::builder()
        .msg_type(Type::Signal)
        .sender(LOGIND.name) // other clients can broadcast on the bus, too
        .interface(LOGIND.interface)
        .member(member)
        .path(LOGIND.object)
        .build()?;
    MessageStream::for_match_rule(rule, connection, None).await
}

/// Kind of shutdown; `None` if the message has none or cancels the shutdown.
fn shutdown_kind(message: &Message) -> Option<String> {
    let (begins, mut details): (bool, HashMap<String, OwnedVariant>) = message.body().deserialize().ok()?;
    let how = String::try_from(details.remove("type")?).ok()?;
    begins
        .then(|| how.chars().take(HOW).map(|c| if c.is_control() { char::REPLACEMENT_CHARACTER } else { c }).collect())
}

impl Session {
    /// Maximum time that logind waits for delay inhibitors (`InhibitDelayMaxUSec`).
    ///
    /// # Errors
    /// If the property cannot be read.
    pub async fn max_inhibit_delay(&self) -> Result<Duration, LogindError> {
        let value = self.property("InhibitDelayMaxUSec").await?;
        let microseconds = u64::try_from(value);
        microseconds
            .map(Duration::from_micros)
            .map_err(|error| LogindError::Call { what: "InhibitDelayMaxUSec", cause: error.to_string() })
    }

    /// Whether a shutdown is in progress (`PreparingForShutdown`).
    ///
    /// # Errors
    /// If the property cannot be read.
    pub async fn is_preparing(&self) -> Result<bool, LogindError> {
        let value = self.property("PreparingForShutdown").await?;
        bool::try_from(value)
            .map_err(|error| LogindError::Call { what: "PreparingForShutdown", cause: error.to_string() })
    }

    /// Takes an inhibitor lock that delays a shutdown until the descriptor is closed.
    ///
    /// # Errors
    /// If logind grants no lock.
    pub async fn inhibit(&self) -> Result<OwnedFd, LogindError> {
        let asked = ("shutdown", "kubelet", "Kubelet needs time to handle node shutdown", "delay");
        let answer = self.call(&LOGIND, None, "Inhibit", &asked).await?;
        let lock = answer.body().deserialize::<zbus::OwnedFd>();
        lock.map(Into::into).map_err(|error| LogindError::Call { what: "Inhibit", cause: error.to_string() })
    }

    /// Reloads the configuration of logind by SIGHUP.
    ///
    /// # Errors
    /// If systemd refuses.
    pub async fn reload(&self) -> Result<(), LogindError> {
        self.call(&SYSTEMD, None, "KillUnit", &("systemd-logind.service", "all", HANGUP)).await.map(drop)
    }

    async fn property(&self, name: &'static str) -> Result<OwnedVariant, LogindError> {
        let answer = self.call(&LOGIND, Some(PROPERTIES), "Get", &(LOGIND.interface, name)).await?;
        answer.body().deserialize().map_err(|error| LogindError::Call { what: name, cause: error.to_string() })
    }

    async fn call<B>(
        &self,
        service: &Service,
        interface: Option<&'static str>,
        method: &'static str,
        body: &B,
    ) -> Result<Message, LogindError>
    where
        B: serde::Serialize + DynamicType,
    {
        let interface = interface.unwrap_or(service.interface);
        let asked = self.0.call_method(Some(service.name), service.object, Some(interface), method, body);
        let failed = |cause: String| LogindError::Call { what: method, cause };
        match timeout(ANSWER, asked).await {
            Ok(answer) => answer.map_err(|error| failed(error.to_string())),
            Err(_) => Err(failed(format!("no response within {ANSWER:?}"))),
        }
    }
}

impl Signals {
    /// Waits for the next shutdown signal. Cancel-safe.
    ///
    /// # Errors
    /// If the connection is lost.
    pub async fn next(&mut self) -> Result<ShutdownSignal, LogindError> {
        loop {
            // Signals with an unexpected body are skipped.
            tokio::select! {
                biased;
                message = self.details.next() => {
                    let message = message.ok_or(LogindError::Lost)?.map_err(|_| LogindError::Lost)?;
                    if let Some(how) = shutdown_kind(&message) {
                        return Ok(ShutdownSignal::Kind(how));
                    }
                }
                message = self.ends.next() => {
                    let message = message.ok_or(LogindError::Lost)?.map_err(|_| LogindError::Lost)?;
                    if let Ok(begins) = message.body().deserialize::<bool>() {
                        return Ok(ShutdownSignal::InProgress(begins));
                    }
                }
            }
        }
    }
}

/// Socket path of a D-Bus address; `None` for an address without a path.
fn socket(address: &str) -> Option<PathBuf> {
    let first = address.split(';').next()?.strip_prefix("unix:")?;
    first.split(',').find_map(|part| part.strip_prefix("path=")).map(PathBuf::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_of_buses() {
        for (address, expected) in [
            ("unix:path=/run/bus", Some("/run/bus")),
            ("unix:path=/run/bus,guid=abc;tcp:host=x", Some("/run/bus")),
            ("unix:abstract=x", None),
            ("tcp:host=x", None),
            ("", None),
        ] {
            assert_eq!(socket(address), expected.map(PathBuf::from), "{address}");
        }
    }
}
