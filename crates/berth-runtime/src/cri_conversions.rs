//! Converts sandboxes and containers to CRI status and list messages. Pure.
//! Implements spec 09a §1, §2.1, §3.2.

use std::collections::{BTreeMap, HashMap};

use super::{
    container::{Container, Phase},
    sandbox::Sandbox,
    store::objects::SandboxPhase,
};
use berth_proto::cri;

/// `PodSandboxStatus`.
pub fn sandbox_status(sandbox: &Sandbox) -> cri::PodSandboxStatus {
    let config = &sandbox.config;
    let options = config.linux.as_ref().and_then(|l| l.security_context.as_ref());
    // Without a security context the pod has its own namespaces (POD), and containerd reports that.
    let options = Some(options.and_then(|context| context.namespace_options.clone()).unwrap_or_default());
    let mut ips = if sandbox.is_ready() { sandbox.meta.ips.iter() } else { [].iter() };
    let ip = ips.next().cloned().unwrap_or_default();
    cri::PodSandboxStatus {
        id: sandbox.id().to_owned(),
        metadata: config.metadata.clone(),
        state: sandbox_state(sandbox).into(),
        created_at: sandbox.meta.created_ns,
        network: Some(cri::PodSandboxNetworkStatus {
            ip,
            additional_ips: ips.map(|ip| cri::PodIp { ip: ip.clone() }).collect(),
        }),
        linux: Some(cri::LinuxPodSandboxStatus { namespaces: Some(cri::Namespace { options }) }),
        labels: config.labels.clone(),
        annotations: config.annotations.clone(),
        runtime_handler: sandbox.meta.runtime_handler.clone(),
    }
}

/// CRI state of a sandbox.
pub fn sandbox_state(sandbox: &Sandbox) -> cri::PodSandboxState {
    if sandbox.is_ready() { cri::PodSandboxState::SandboxReady } else { cri::PodSandboxState::SandboxNotready }
}

/// Whether a sandbox is visible to clients.
pub fn is_listed(sandbox: &Sandbox) -> bool {
    sandbox.phase != SandboxPhase::Creating && !sandbox.is_removed
}

/// Entry of `ListPodSandbox`.
pub fn sandbox_item(sandbox: &Sandbox) -> cri::PodSandbox {
    cri::PodSandbox {
        id: sandbox.id().to_owned(),
        metadata: sandbox.config.metadata.clone(),
        state: sandbox_state(sandbox).into(),
        created_at: sandbox.meta.created_ns,
        labels: sandbox.config.labels.clone(),
        annotations: sandbox.config.annotations.clone(),
        runtime_handler: sandbox.meta.runtime_handler.clone(),
    }
}

/// Entry of `ListContainers`.
pub fn container_item(container: &Container) -> cri::Container {
    cri::Container {
        id: container.id().to_owned(),
        pod_sandbox_id: container.meta.sandbox_id.clone(),
        metadata: container.config.metadata.clone(),
        image: container.config.image.clone(),
        image_ref: container.meta.image_id.clone(),
        state: container.state().into(),
        created_at: container.meta.created_ns,
        labels: container.config.labels.clone(),
        annotations: container.config.annotations.clone(),
        image_id: container.meta.image_id.clone(),
    }
}

/// `ContainerStatus`.
pub fn container_status(container: &Container) -> cri::ContainerStatus {
    let (meta, config) = (&container.meta, &container.config);
    let (uid, gid, groups) = &meta.user;
    let user = cri::LinuxContainerUser {
        uid: i64::from(*uid),
        gid: i64::from(*gid),
        supplemental_groups: groups.iter().copied().map(i64::from).collect(),
    };
    let status = cri::ContainerStatus {
        id: meta.id.clone(),
        metadata: config.metadata.clone(),
        state: container.state().into(),
        created_at: meta.created_ns,
        image: Some(cri::ImageSpec { image: meta.image_name.clone(), ..config.image.clone().unwrap_or_default() }),
        image_ref: meta.image_digest.clone(),
        image_id: meta.image_id.clone(),
        labels: config.labels.clone(),
        annotations: config.annotations.clone(),
        mounts: config.mounts.iter().map(|mount| mounted(mount, &meta.mounted)).collect(),
        log_path: meta.log_path.as_ref().map(|path| path.to_string_lossy().into_owned()).unwrap_or_default(),
        resources: container
            .resources
            .clone()
            .map(|linux| cri::ContainerResources { linux: Some(linux), windows: None }),
        user: Some(cri::ContainerUser { linux: Some(user) }),
        stop_signal: signal_name(meta.stop_signal).into(),
        ..Default::default()
    };
    match &container.phase {
        Phase::Created | Phase::Starting => status,
        Phase::Running(started) => cri::ContainerStatus { started_at: started.at_ns, ..status },
        Phase::Exited(ended) => cri::ContainerStatus {
            started_at: ended.started_ns,
            finished_at: ended.finished_ns,
            exit_code: ended.code,
            reason: ended.reason.clone(),
            message: ended.message.clone(),
            ..status
        },
    }
}

/// A requested mount; for an image volume with the image's id.
fn mounted(mount: &cri::Mount, images: &BTreeMap<String, String>) -> cri::Mount {
    let mut resolved = mount.clone();
    if let (Some(image), Some(id)) = (&mut resolved.image, images.get(&mount.container_path)) {
        image.image_ref.clone_from(id);
    }
    resolved
}

/// Statuses of all containers of a sandbox, newest first.
pub fn container_statuses(sandbox: &Sandbox) -> Vec<cri::ContainerStatus> {
    let mut all: Vec<_> = sandbox.containers.values().map(container_status).collect();
    all.sort_by_key(|status| std::cmp::Reverse(status.created_at));
    all
}

/// Whether a sandbox matches the filter's state and labels; the caller checks the id.
pub fn sandbox_fits(item: &cri::PodSandbox, filter: Option<&cri::PodSandboxFilter>) -> bool {
    filter.is_none_or(|filter| {
        filter.state.as_ref().is_none_or(|wanted| wanted.state == item.state)
            && has_labels(&item.labels, &filter.label_selector)
    })
}

/// Whether a container matches the filter's state and labels; the caller checks the ids.
pub fn container_fits(item: &cri::Container, filter: Option<&cri::ContainerFilter>) -> bool {
    filter.is_none_or(|filter| {
        filter.state.as_ref().is_none_or(|wanted| wanted.state == item.state)
            && has_labels(&item.labels, &filter.label_selector)
    })
}

/// Whether all wanted labels are present with their values.
pub fn has_labels(all: &HashMap<String, String>, wanted: &HashMap<String, String>) -> bool {
    wanted.iter().all(|(key, value)| all.get(key) == Some(value))
}

/// Signal names with their numbers on Linux.
const SIGNALS: [(&str, i32); 36] = [
    ("SIGHUP", 1),
    ("SIGINT", 2),
    ("SIGQUIT", 3),
    ("SIGILL", 4),
    ("SIGTRAP", 5),
    ("SIGABRT", 6),
    ("SIGIOT", 6),
    ("SIGBUS", 7),
    ("SIGFPE", 8),
    ("SIGKILL", 9),
    ("SIGUSR1", 10),
    ("SIGSEGV", 11),
    ("SIGUSR2", 12),
    ("SIGPIPE", 13),
    ("SIGALRM", 14),
    ("SIGTERM", 15),
    ("SIGSTKFLT", 16),
    ("SIGCHLD", 17),
    ("SIGCLD", 17),
    ("SIGCONT", 18),
    ("SIGSTOP", 19),
    ("SIGTSTP", 20),
    ("SIGTTIN", 21),
    ("SIGTTOU", 22),
    ("SIGURG", 23),
    ("SIGXCPU", 24),
    ("SIGXFSZ", 25),
    ("SIGVTALRM", 26),
    ("SIGPROF", 27),
    ("SIGWINCH", 28),
    ("SIGIO", 29),
    ("SIGPOLL", 29),
    ("SIGPWR", 30),
    ("SIGSYS", 31),
    ("SIGRTMIN", 34),
    ("SIGRTMAX", 64),
];

/// Parses a signal name or number: `SIGTERM`, `TERM`, `15`, `SIGRTMIN+3`; `None` if invalid.
pub fn signal_number(name: &str) -> Option<i32> {
    let name = name.trim().to_ascii_uppercase();
    if let Ok(number) = name.parse::<i32>() {
        return (1..=64).contains(&number).then_some(number);
    }
    let name = if name.starts_with("SIG") { name } else { format!("SIG{name}") };
    let named = |name: &str| SIGNALS.iter().find(|(known, _)| *known == name).map(|(_, number)| *number);
    if let Some(number) = named(&name) {
        return Some(number);
    }
    let from = |base: &str, sign: i32, name: &str| {
        let rest = name.strip_prefix(base)?.parse::<i32>().ok()?;
        let number = named(base)? + sign * rest;
        ((0..=15).contains(&rest) && (34..=64).contains(&number)).then_some(number)
    };
    let plain = name.replace("PLUS", "+").replace("MINUS", "-");
    let (plus, minus) = (plain.replace('+', ""), plain.replace('-', ""));
    if plain.contains('+') { from("SIGRTMIN", 1, &plus) } else { from("SIGRTMAX", -1, &minus) }
}

/// The CRI name of a signal.
fn signal_name(number: i32) -> cri::Signal {
    let name = SIGNALS.iter().find(|(_, known)| *known == number).map(|(name, _)| (*name).to_owned());
    let name = name.unwrap_or_else(|| match number {
        35..=49 => format!("SIGRTMINPLUS{}", number - 34),
        _ => format!("SIGRTMAXMINUS{}", 64 - number),
    });
    cri::Signal::from_str_name(&name).unwrap_or(cri::Signal::Sigterm)
}

/// The stop signal of a container: the request's, else the image's, else `SIGTERM`.
///
/// # Errors
/// The requested number is not a CRI signal.
pub fn stop_signal(requested: i32, image: &str) -> Result<i32, String> {
    const TERM: i32 = 15;
    let signal = cri::Signal::try_from(requested).map_err(|_| format!("unknown stop signal {requested}"))?;
    if signal != cri::Signal::RuntimeDefault {
        return signal_number(signal.as_str_name()).ok_or_else(|| format!("unknown stop signal {requested}"));
    }
    // An unknown signal of the image counts as unspecified.
    Ok(signal_number(image).unwrap_or(TERM))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture::{container, sandbox};
    use berth_shim::plan::StartedProcess;

    #[test]
    fn signals_have_names_and_numbers() {
        for (name, number) in [
            ("SIGTERM", Some(15)),
            ("term", Some(15)),
            ("9", Some(9)),
            ("SIGRTMIN+3", Some(37)),
            ("RTMAX-2", Some(62)),
            ("SIGRTMINPLUS15", Some(49)),
            ("SIGRTMAXMINUS14", Some(50)),
            ("SIGRTMIN+16", None),
            ("0", None),
            ("65", None),
            ("", None),
            ("SIGNOTHING", None),
        ] {
            assert_eq!(signal_number(name), number, "{name}");
        }
        for number in 1..=65 {
            let signal = cri::Signal::try_from(number).expect("known");
            let linux = signal_number(signal.as_str_name()).expect("a signal of Linux");
            let back = signal_number(signal_name(linux).as_str_name());
            assert_eq!(back, Some(linux), "{}", signal.as_str_name());
        }
    }

    #[test]
    fn the_requests_signal_wins_over_the_images() {
        let usr1 = cri::Signal::Sigusr1.into();
        assert_eq!(stop_signal(usr1, "SIGQUIT"), Ok(10));
        assert_eq!(stop_signal(0, "SIGQUIT"), Ok(3));
        assert_eq!(stop_signal(0, "nonsense"), Ok(15));
        assert_eq!(stop_signal(0, ""), Ok(15));
        assert!(stop_signal(99, "").is_err());
    }

    #[test]
    fn addresses_are_those_of_what_is_ready() {
        let mut sandbox = sandbox("s");
        let meta = std::sync::Arc::make_mut(&mut sandbox.meta);
        meta.ips = vec!["10.0.0.2".to_owned(), "fd00::2".to_owned()];
        let network = sandbox_status(&sandbox).network.expect("always there");
        assert_eq!((network.ip.as_str(), network.additional_ips.len()), ("10.0.0.2", 1));
        sandbox.phase = SandboxPhase::NotReady;
        let network = sandbox_status(&sandbox).network.expect("always there");
        assert_eq!((network.ip.as_str(), network.additional_ips.len()), ("", 0));
    }

    #[test]
    fn namespaces_are_reported_even_if_the_request_names_none() {
        let options = |linux: Option<cri::LinuxPodSandboxConfig>| {
            let mut sandbox = sandbox("s");
            std::sync::Arc::make_mut(&mut sandbox.config).linux = linux;
            sandbox_status(&sandbox).linux.and_then(|linux| linux.namespaces).and_then(|all| all.options)
        };
        let of = |network: cri::NamespaceMode| cri::NamespaceOption { network: network.into(), ..Default::default() };
        let with = |namespace_options| {
            let context = cri::LinuxSandboxSecurityContext { namespace_options, ..Default::default() };
            Some(cri::LinuxPodSandboxConfig { security_context: Some(context), ..Default::default() })
        };
        for (linux, expected) in [
            (None, cri::NamespaceMode::Pod),
            (Some(cri::LinuxPodSandboxConfig::default()), cri::NamespaceMode::Pod),
            (with(None), cri::NamespaceMode::Pod),
            (with(Some(of(cri::NamespaceMode::Node))), cri::NamespaceMode::Node),
        ] {
            assert_eq!(options(linux), Some(of(expected)), "{expected:?}");
        }
    }

    #[test]
    fn status_times_follow_the_container_state() {
        let mut c = container("c");
        let times = |c: &Container| {
            let status = container_status(c);
            (status.created_at, status.started_at, status.finished_at)
        };
        assert_eq!(times(&c), (50, 0, 0));
        c.begin_start().expect("created");
        c.mark_started(StartedProcess { pid: 1, start_ticks: 1, at_ns: 100, ..StartedProcess::default() });
        assert_eq!(times(&c), (50, 100, 0));
        c.mark_lost(120);
        assert_eq!(times(&c), (50, 100, 120));
        let status = container_status(&c);
        assert_eq!((status.exit_code, status.reason.as_str()), (255, "Unknown"));
        assert_eq!(status.stop_signal(), cri::Signal::Sigterm);
    }
}
