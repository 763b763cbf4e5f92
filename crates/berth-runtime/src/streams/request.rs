//! Validates Exec, Attach, and PortForward requests. Pure.
//! Implements spec 09a §4.

use crate::errors::RuntimeError;
use berth_proto::cri;

/// The stdio streams that a client requests.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct StdioStreams {
    /// Standard input.
    pub stdin: bool,
    /// Standard output.
    pub stdout: bool,
    /// Standard error; never together with a terminal.
    pub stderr: bool,
    /// Terminal.
    pub tty: bool,
}

/// A validated streaming request that waits for its client.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum StreamRequest {
    /// Runs a new process in a container.
    Exec {
        /// Container id.
        container: String,
        /// Program and arguments.
        command: Vec<String>,
        /// Requested streams.
        wanted: StdioStreams,
    },
    /// Attaches to the first process of a container.
    Attach {
        /// Container id.
        container: String,
        /// Requested streams.
        wanted: StdioStreams,
    },
    /// Forwards connections to ports of a sandbox.
    Forward {
        /// Sandbox id.
        sandbox: String,
        /// Ports, for clients that do not name one per connection.
        ports: Vec<u16>,
    },
}

impl StreamRequest {
    /// Validates an `Exec` request.
    ///
    /// # Errors
    /// The container id or the command is missing, or the stream combination is invalid.
    pub fn exec(request: cri::ExecRequest) -> Result<Self, RuntimeError> {
        let cri::ExecRequest { container_id, cmd, tty, stdin, stdout, stderr } = request;
        let wanted = wanted(&container_id, StdioStreams { stdin, stdout, stderr, tty })?;
        if cmd.is_empty() {
            return Err(RuntimeError::invalid("command must not be empty"));
        }
        Ok(Self::Exec { container: container_id, command: cmd, wanted })
    }

    /// Validates an `Attach` request.
    ///
    /// # Errors
    /// The container id is missing, or the stream combination is invalid.
    pub fn attach(request: cri::AttachRequest) -> Result<Self, RuntimeError> {
        let cri::AttachRequest { container_id, stdin, tty, stdout, stderr } = request;
        let wanted = wanted(&container_id, StdioStreams { stdin, stdout, stderr, tty })?;
        Ok(Self::Attach { container: container_id, wanted })
    }

    /// Validates a `PortForward` request.
    ///
    /// # Errors
    /// The sandbox id is missing, or a port is out of range.
    pub fn forward(request: cri::PortForwardRequest) -> Result<Self, RuntimeError> {
        if request.pod_sandbox_id.is_empty() {
            return Err(RuntimeError::invalid("missing required pod_sandbox_id"));
        }
        let port = |number: i32| match u16::try_from(number) {
            Ok(port @ 1..) => Ok(port),
            _ => Err(RuntimeError::invalid(format!("invalid port {number}: must be between 1 and 65535"))),
        };
        let ports = request.port.into_iter().map(port).collect::<Result<_, _>>()?;
        Ok(Self::Forward { sandbox: request.pod_sandbox_id, ports })
    }

    /// First path component of the URL: `exec`, `attach`, `portforward`.
    pub fn verb(&self) -> &'static str {
        match self {
            Self::Exec { .. } => "exec",
            Self::Attach { .. } => "attach",
            Self::Forward { .. } => "portforward",
        }
    }
}

fn wanted(container: &str, wanted: StdioStreams) -> Result<StdioStreams, RuntimeError> {
    if container.is_empty() {
        return Err(RuntimeError::invalid("missing required container_id"));
    }
    if wanted.tty && wanted.stderr {
        return Err(RuntimeError::invalid("tty and stderr cannot both be true"));
    }
    if wanted.stdin || wanted.stdout || wanted.stderr {
        Ok(wanted)
    } else {
        Err(RuntimeError::invalid("one of stdin, stdout, or stderr must be set"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::errors::ErrorKind;

    #[test]
    fn what_cannot_be_meant_is_refused() {
        let exec = |id: &str, cmd: &[&str], flags: [bool; 4]| {
            let [stdin, stdout, stderr, tty] = flags;
            let cmd = cmd.iter().map(|&word| word.to_owned()).collect();
            StreamRequest::exec(cri::ExecRequest { container_id: id.to_owned(), cmd, tty, stdin, stdout, stderr })
        };
        let rows: [(Result<StreamRequest, RuntimeError>, &str); 9] = [
            (exec("", &["a"], [true; 4]), "missing required container_id"),
            (exec("c", &["a"], [true; 4]), "tty and stderr cannot both be true"),
            (exec("c", &["a"], [false; 4]), "one of stdin, stdout, or stderr must be set"),
            (exec("c", &["a"], [false, false, false, true]), "one of stdin, stdout, or stderr must be set"),
            (exec("c", &[], [true; 4].map(|_| false)), "one of stdin, stdout, or stderr must be set"),
            (exec("c", &[], [true, true, true, false]), "command must not be empty"),
            (StreamRequest::attach(cri::AttachRequest::default()), "missing required container_id"),
            (StreamRequest::forward(cri::PortForwardRequest::default()), "missing required pod_sandbox_id"),
            (
                StreamRequest::forward(cri::PortForwardRequest {
                    pod_sandbox_id: "s".to_owned(),
                    port: vec![80, 65536],
                }),
                "invalid port 65536: must be between 1 and 65535",
            ),
        ];
        for (asked, text) in rows {
            assert_eq!(asked, Err(RuntimeError::new(ErrorKind::Invalid, text)), "{text}");
        }
        let wanted = StdioStreams { stdin: true, stdout: true, stderr: false, tty: true };
        let expected = StreamRequest::Exec { container: "c".to_owned(), command: vec!["a".to_owned()], wanted };
        assert_eq!(exec("c", &["a"], [true, true, false, true]), Ok(expected.clone()));
        assert_eq!(expected.verb(), "exec");
        let ports = cri::PortForwardRequest { pod_sandbox_id: "s".to_owned(), port: vec![1, 65535] };
        assert_eq!(
            StreamRequest::forward(ports),
            Ok(StreamRequest::Forward { sandbox: "s".to_owned(), ports: vec![1, 65535] })
        );
    }
}
