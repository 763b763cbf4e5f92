//! Validates probes and lifecycle hooks. Pure.

use super::{
    field::{FieldErrors, Path},
    names_and_numbers::{port, port_or_name},
};
use berth_types::api;

/// Valid stop signals of Linux containers.
const LINUX_SIGNALS: [&str; 65] = [
    "SIGABRT",
    "SIGALRM",
    "SIGBUS",
    "SIGCHLD",
    "SIGCLD",
    "SIGCONT",
    "SIGFPE",
    "SIGHUP",
    "SIGILL",
    "SIGINT",
    "SIGIO",
    "SIGIOT",
    "SIGKILL",
    "SIGPIPE",
    "SIGPOLL",
    "SIGPROF",
    "SIGPWR",
    "SIGQUIT",
    "SIGRTMAX",
    "SIGRTMAX-1",
    "SIGRTMAX-10",
    "SIGRTMAX-11",
    "SIGRTMAX-12",
    "SIGRTMAX-13",
    "SIGRTMAX-14",
    "SIGRTMAX-2",
    "SIGRTMAX-3",
    "SIGRTMAX-4",
    "SIGRTMAX-5",
    "SIGRTMAX-6",
    "SIGRTMAX-7",
    "SIGRTMAX-8",
    "SIGRTMAX-9",
    "SIGRTMIN",
    "SIGRTMIN+1",
    "SIGRTMIN+10",
    "SIGRTMIN+11",
    "SIGRTMIN+12",
    "SIGRTMIN+13",
    "SIGRTMIN+14",
    "SIGRTMIN+15",
    "SIGRTMIN+2",
    "SIGRTMIN+3",
    "SIGRTMIN+4",
    "SIGRTMIN+5",
    "SIGRTMIN+6",
    "SIGRTMIN+7",
    "SIGRTMIN+8",
    "SIGRTMIN+9",
    "SIGSEGV",
    "SIGSTKFLT",
    "SIGSTOP",
    "SIGSYS",
    "SIGTERM",
    "SIGTRAP",
    "SIGTSTP",
    "SIGTTIN",
    "SIGTTOU",
    "SIGURG",
    "SIGUSR1",
    "SIGUSR2",
    "SIGVTALRM",
    "SIGWINCH",
    "SIGXCPU",
    "SIGXFSZ",
];
/// Valid stop signals of Windows containers.
const WINDOWS_SIGNALS: [&str; 2] = ["SIGKILL", "SIGTERM"];

/// Kind of a probe, because the rules differ.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum ProbeKind {
    /// Liveness or startup: the success threshold must be 1.
    Killing,
    /// Readiness: must not have a grace period of its own.
    Readiness,
}

/// The handlers of a probe or hook.
struct Handlers<'a> {
    exec: Option<&'a api::ExecAction>,
    http: Option<&'a api::HTTPGetAction>,
    tcp: Option<&'a api::TCPSocketAction>,
    grpc: Option<&'a api::GRPCAction>,
    sleep: Option<&'a api::SleepAction>,
}

/// Checks a probe.
pub fn probe(probe: &api::Probe, kind: ProbeKind, at: &Path, errors: &mut FieldErrors) {
    let found = Handlers {
        exec: probe.exec.as_ref(),
        http: probe.http_get.as_ref(),
        tcp: probe.tcp_socket.as_ref(),
        grpc: probe.grpc.as_ref(),
        sleep: None,
    };
    handlers(&found, 0, at, errors);
    for (member, value) in [
        ("initialDelaySeconds", probe.initial_delay_seconds),
        ("timeoutSeconds", probe.timeout_seconds),
        ("periodSeconds", probe.period_seconds),
        ("successThreshold", probe.success_threshold),
        ("failureThreshold", probe.failure_threshold),
    ] {
        errors.not_negative(&at.child(member), value);
    }
    let grace = at.child("terminationGracePeriodSeconds");
    if let Some(seconds) = probe.termination_grace_period_seconds {
        if seconds <= 0 {
            errors.invalid(&grace, seconds, "must be greater than 0");
        }
        if kind == ProbeKind::Readiness {
            errors.invalid(&grace, seconds, "must not be set for readinessProbes");
        }
    }
    if kind == ProbeKind::Killing
        && let Some(threshold) = probe.success_threshold.filter(|threshold| *threshold != 1)
    {
        errors.invalid(&at.child("successThreshold"), threshold, "must be 1");
    }
}

/// Checks the hooks and the stop signal of a container; `grace` is the pod's grace period in seconds,
/// and `os` its `spec.os.name`.
pub fn lifecycle(hooks: &api::Lifecycle, grace: i64, os: Option<&str>, at: &Path, errors: &mut FieldErrors) {
    for (member, hook) in [("postStart", &hooks.post_start), ("preStop", &hooks.pre_stop)] {
        let Some(hook) = hook else { continue };
        let found = Handlers {
            exec: hook.exec.as_ref(),
            http: hook.http_get.as_ref(),
            tcp: hook.tcp_socket.as_ref(),
            grpc: None,
            sleep: hook.sleep.as_ref(),
        };
        handlers(&found, grace, &at.child(member), errors);
    }
    let at = at.child("stopSignal");
    match (hooks.stop_signal.as_deref(), os) {
        (None, _) => {}
        (Some(_), None) => errors.forbidden(&at, "may not be set for containers with empty `spec.os.name`"),
        (Some(signal), Some("linux")) if !LINUX_SIGNALS.contains(&signal) => {
            errors.unsupported(&at, signal, &LINUX_SIGNALS);
        }
        (Some(signal), Some("windows")) if !WINDOWS_SIGNALS.contains(&signal) => {
            errors.unsupported(&at, signal, &WINDOWS_SIGNALS);
        }
        (Some(_), Some(_)) => {}
    }
}

fn handlers(found: &Handlers<'_>, grace: i64, at: &Path, errors: &mut FieldErrors) {
    let mut first = true;
    let mut only = |member: &str, errors: &mut FieldErrors| {
        if !std::mem::take(&mut first) {
            errors.forbidden(&at.child(member), "may not specify more than 1 handler type");
            return false;
        }
        true
    };
    if let Some(exec) = found.exec
        && only("exec", errors)
        && exec.command.as_ref().is_none_or(Vec::is_empty)
    {
        errors.required(&at.child("exec").child("command"), "");
    }
    if let Some(get) = found.http
        && only("httpGet", errors)
    {
        http_get(get, &at.child("httpGet"), errors);
    }
    if let Some(tcp) = found.tcp
        && only("tcpSocket", errors)
    {
        port_or_name(&tcp.port, &at.child("tcpSocket").child("port"), errors);
    }
    if let Some(grpc) = found.grpc
        && only("grpc", errors)
    {
        port(grpc.port, &at.child("grpc").child("port"), errors);
    }
    if let Some(sleep) = found.sleep
        && only("sleep", errors)
        && !(0..=grace).contains(&sleep.seconds)
    {
        let text = format!("must be non-negative and less than terminationGracePeriodSeconds ({grace})");
        errors.invalid(&at.child("sleep"), sleep.seconds, &text);
    }
    if first {
        errors.required(at, "must specify a handler type");
    }
}

fn http_get(get: &api::HTTPGetAction, at: &Path, errors: &mut FieldErrors) {
    if get.path.as_deref().unwrap_or_default().is_empty() {
        errors.required(&at.child("path"), "");
    }
    port_or_name(&get.port, &at.child("port"), errors);
    errors.supported(&at.child("scheme"), get.scheme.as_deref().unwrap_or_default(), &["HTTP", "HTTPS"]);
    for header in get.http_headers.iter().flatten() {
        let good = |b: u8| b.is_ascii_alphanumeric() || b == b'-';
        if header.name.is_empty() || !header.name.bytes().all(good) {
            let text = "a valid HTTP header must consist of alphanumeric characters or '-' (e.g. 'X-Header-Name', \
                        regex used for validation is '[-A-Za-z0-9]+')";
            errors.invalid(&at.child("httpHeaders"), &header.name, text);
        }
    }
}
