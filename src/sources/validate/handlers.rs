//! Probes and lifecycle hooks. Pure.

use super::{
    field::{FieldErrors, Path},
    names_and_numbers::{port, port_or_name},
};
use crate::pod::api;

/// Which probe, because the rules differ.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum ProbeKind {
    /// Liveness or startup: one success counts.
    Killing,
    /// Readiness: has no grace period of its own.
    Readiness,
}

/// The handlers that a probe or hook may have.
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
    match (kind, probe.termination_grace_period_seconds) {
        (ProbeKind::Readiness, Some(seconds)) => errors.invalid(&grace, seconds, "must not be set for readinessProbes"),
        (ProbeKind::Killing, Some(seconds)) if seconds <= 0 => {
            errors.invalid(&grace, seconds, "must be greater than 0");
        }
        _ => {}
    }
    if kind == ProbeKind::Killing
        && let Some(threshold) = probe.success_threshold.filter(|threshold| *threshold != 1)
    {
        errors.invalid(&at.child("successThreshold"), threshold, "must be 1");
    }
}

/// Checks the hooks of a container; `grace` is the pod's grace period, seconds.
pub fn lifecycle(hooks: &api::Lifecycle, grace: i64, at: &Path, errors: &mut FieldErrors) {
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
        let text = "must be non-negative and less than terminationGracePeriodSeconds";
        errors.invalid(&at.child("sleep").child("seconds"), sleep.seconds, text);
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
    errors.one_of(&at.child("scheme"), get.scheme.as_deref(), &["HTTP", "HTTPS"]);
    for header in get.http_headers.iter().flatten() {
        let good = |b: u8| b.is_ascii_alphanumeric() || b == b'-';
        if header.name.is_empty() || !header.name.bytes().all(good) {
            let text = "a valid HTTP header must consist of alphanumeric characters or '-' (e.g. 'X-Header-Name', \
                        regex used for validation is '[-A-Za-z0-9]+')";
            errors.invalid(&at.child("httpHeaders"), &header.name, text);
        }
    }
}
