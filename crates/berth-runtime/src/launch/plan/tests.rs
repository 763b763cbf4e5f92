//! Table tests for whole launch plans.

use super::*;
use crate::launch::{
    fixture,
    image::{ImageConfig, LaunchImage},
    inputs::{LinuxDevice, ResolvedResources},
};
use berth_shim::plan::Access;

fn context(config: &mut cri::ContainerConfig) -> &mut cri::LinuxContainerSecurityContext {
    config.linux.get_or_insert_default().security_context.get_or_insert_default()
}

fn changed(change: impl FnOnce(&mut cri::LinuxContainerSecurityContext)) -> cri::ContainerConfig {
    let mut config = fixture::container_config();
    change(context(&mut config));
    config
}

fn privileged_sandbox() -> cri::PodSandboxConfig {
    let mut sandbox = fixture::sandbox_config();
    sandbox.linux.get_or_insert_default().security_context.get_or_insert_default().privileged = true;
    sandbox
}

fn plan(config: &cri::ContainerConfig) -> Result<Launch, String> {
    let facts = fixture::Facts::default();
    launch(&facts.inputs(config, &fixture::sandbox_config())).map_err(|refusal| refusal.text)
}

#[test]
fn a_container_that_asks_for_nothing_gets_the_usual() {
    let got = plan(&fixture::container_config()).expect("a plan");
    let process = &got.plan.process;
    assert_eq!(process.args, ["/bin/true"]);
    assert_eq!((process.uid, process.gid, &*process.groups, process.cwd.as_str()), (0, 0, &[0][..], "/"));
    assert_eq!((process.terminal, process.oom_score_adj, process.no_new_privileges), (None, None, false));
    assert_eq!((&process.seccomp, process.seccomp_flags, &process.apparmor), (&None, 0, &None));
    assert_eq!(process.limits, [(7, 1024, 524_288)]);
    assert_eq!(process.capabilities.bounding, 0xa804_25fb);
    assert_eq!(got.plan.processes, PidNamespace::Pod);
    assert!(got.plan.has_group_namespace && !got.plan.root.is_read_only && !got.plan.root.is_shared);
    assert_eq!((got.plan.devices.len(), got.plan.mounts.len(), got.device_rules.len()), (6, 10, 11));
    assert_eq!(got.plan.log, Some("/var/log/pods/p/c/0.log".into()));
}

#[test]
fn what_is_missing_or_wrong_is_refused_when_it_is_created() {
    let nameless = cri::ContainerConfig { metadata: None, ..fixture::container_config() };
    assert_eq!(plan(&nameless), Err("container config must include metadata".to_owned()));
    let wordless = cri::ContainerConfig { command: vec![], ..fixture::container_config() };
    assert_eq!(plan(&wordless), Err("no command specified".to_owned()));
    let config = changed(|context| context.privileged = true);
    assert_eq!(plan(&config), Err("no privileged container allowed in sandbox".to_owned()));
    // AC-09a-X3
    let config = changed(|context| context.run_as_group = Some(cri::Int64Value { value: 5 }));
    assert_eq!(plan(&config), Err("user group \"5\" is specified without user".to_owned()));
    let config = changed(|context| {
        context.selinux_options = Some(cri::SeLinuxOption { level: "x".to_owned(), ..Default::default() });
    });
    assert_eq!(plan(&config), Err("the format of 'level' \"x\" is not correct".to_owned()));
    let config = changed(|context| {
        let kind = cri::security_profile::ProfileType::Localhost.into();
        context.seccomp = Some(cri::SecurityProfile { profile_type: kind, localhost_ref: "/none".to_owned() });
    });
    assert_eq!(plan(&config), Err("failed to load seccomp profile \"/none\": not found".to_owned()));
    let config = cri::ContainerConfig { log_path: "../x".to_owned(), ..fixture::container_config() };
    assert!(plan(&config).is_err());
}

#[test]
fn privileged_containers_are_hardly_apart_from_the_host() {
    let config = changed(|context| {
        context.privileged = true;
        context.readonly_rootfs = true;
        context.no_new_privs = true;
        context.masked_paths = vec!["/proc/kcore".to_owned()];
        context.readonly_paths = vec!["/proc/sys".to_owned()];
        context.seccomp = Some(cri::SecurityProfile::default());
        context.run_as_user = Some(cri::Int64Value { value: 5 });
    });
    let node = LinuxDevice {
        path: "/dev/kvm".into(),
        kind: 'c',
        numbers: (10, 232),
        mode: 0o660,
        uid: 0,
        gid: 109,
        access: "rwm".into(),
    };
    let found = ResolvedResources { host_devices: vec![node], ..ResolvedResources::default() };
    let facts = fixture::Facts { found, ..fixture::Facts::default() };
    let got = launch(&facts.inputs(&config, &privileged_sandbox())).expect("a plan");
    let process = &got.plan.process;
    assert_eq!(process.capabilities.effective, facts.host.capabilities);
    assert_eq!((process.seccomp.is_none(), process.no_new_privileges, process.uid), (true, true, 5));
    assert!(got.plan.masked.is_empty() && got.plan.read_only.is_empty());
    assert!(got.plan.root.is_read_only && !got.plan.has_group_namespace);
    assert_eq!(got.device_rules.len(), 1);
    assert_eq!(got.plan.devices.last().map(|device| device.path.as_str()), Some("/dev/kvm"));
    let sys = got.plan.mounts.iter().find(|mount| mount.target == "/sys").expect("a mount");
    assert_eq!(sys.access, Access::ReadWrite);
}

#[test]
fn the_default_filter_is_compiled_for_the_containers_capabilities() {
    let filter = |add: &[&str]| {
        let config = changed(|context| {
            context.seccomp = Some(cri::SecurityProfile::default());
            context.capabilities = Some(cri::Capability {
                add_capabilities: add.iter().map(|name| (*name).to_owned()).collect(),
                ..Default::default()
            });
        });
        plan(&config).expect("a plan").plan.process
    };
    let (plain, admin) = (filter(&[]), filter(&["SYS_ADMIN"]));
    assert!(plain.seccomp.as_ref().is_some_and(|bytes| !bytes.is_empty() && bytes.len() % 8 == 0));
    assert_ne!(plain.seccomp, admin.seccomp);
    assert_eq!(plain.seccomp_flags, 4);
    // AC-09a-X9: an exec process has the same filter.
    let first = LaunchPlan { process: plain.clone(), ..plan(&fixture::container_config()).expect("a plan").plan };
    let later = exec(&first, "e", &["id".to_owned()], None).expect("a plan");
    assert_eq!((later.process.seccomp, later.process.capabilities), (plain.seccomp, plain.capabilities));
}

#[test]
fn later_processes_have_words_and_a_terminal_of_their_own() {
    let config = cri::ContainerConfig { tty: true, ..fixture::container_config() };
    let first = plan(&config).expect("a plan").plan;
    assert_eq!(first.process.terminal, Some((80, 24)));
    let got = exec(&first, "e", &["id".to_owned(), "-G".to_owned()], None).expect("a plan");
    assert_eq!((got.container.as_str(), got.exec.as_str()), ("container-1", "e"));
    assert_eq!((got.process.terminal, &got.process.env), (None, &first.process.env));
    let first = plan(&fixture::container_config()).expect("a plan").plan;
    let got = exec(&first, "e", &["id".to_owned()], Some((7, 8))).expect("a plan");
    assert_eq!(got.process.terminal, Some((7, 8)));
    assert!(
        got.process.env.contains(&"TERM=xterm".to_owned()) && !first.process.env.contains(&"TERM=xterm".to_owned())
    );
    assert_eq!(exec(&first, "e", &[], None), Err(LaunchError::invalid("exec cmd must not be empty")));
}

#[test]
fn devices_can_belong_to_who_uses_them() {
    let node = LinuxDevice {
        path: "/dev/fuse".into(),
        kind: 'c',
        numbers: (10, 229),
        mode: 0o600,
        uid: 0,
        gid: 0,
        access: "rw".into(),
    };
    let config = ImageConfig { user: "7".to_owned(), ..ImageConfig::default() };
    let image = LaunchImage { config, ..LaunchImage::default() };
    let config = changed(|context| context.run_as_user = Some(cri::Int64Value { value: 1000 }));
    for (owns, config, expected) in
        [(false, &config, (0, 0)), (true, &config, (1000, 0)), (true, &fixture::container_config(), (0, 0))]
    {
        let facts = fixture::Facts {
            host: Host { owns_devices: owns, ..fixture::host() },
            found: ResolvedResources { devices: vec![node.clone()], ..ResolvedResources::default() },
            image: image.clone(),
        };
        let got = launch(&facts.inputs(config, &fixture::sandbox_config())).expect("a plan");
        let device = got.plan.devices.last().expect("a device");
        assert_eq!((device.uid, device.gid), expected);
    }
}

#[test]
fn native_images_make_no_32_bit_system_calls_under_the_built_in_profile() {
    let profile = |profile_type: cri::security_profile::ProfileType| {
        let wanted = cri::SecurityProfile { profile_type: profile_type.into(), ..Default::default() };
        changed(|context| context.seccomp = Some(wanted))
    };
    let config = profile(cri::security_profile::ProfileType::RuntimeDefault);
    let compiled = |restricted: bool| {
        let mut profile = seccomp::SeccompProfile::parse(seccomp::DEFAULT_PROFILE.as_bytes()).expect("a profile");
        if restricted {
            profile.restrict_to(seccomp::CpuArchitecture::X86_64);
        }
        let conditions = seccomp::Conditions {
            machine: seccomp::CpuArchitecture::X86_64,
            capabilities: names(0xa804_25fb),
            kernel: fixture::host().kernel,
            has_spec_allow: true,
        };
        seccomp::compile(&profile, &conditions).expect("a program").bytes()
    };
    assert_ne!(compiled(true), compiled(false));
    for (architecture, allows_32_bit, restricted) in
        [("", false, true), ("amd64", false, true), ("386", false, false), ("amd64", true, false)]
    {
        let facts = fixture::Facts {
            host: Host { allows_32_bit, ..fixture::host() },
            image: LaunchImage { architecture: architecture.to_owned(), ..LaunchImage::default() },
            ..fixture::Facts::default()
        };
        let got = launch(&facts.inputs(&config, &fixture::sandbox_config())).expect("a plan");
        assert_eq!(got.plan.process.seccomp, Some(compiled(restricted)), "{architecture} {allows_32_bit}");
    }
}

#[test]
fn an_environment_that_fits_no_message_is_refused_when_it_is_created() {
    let with = |bytes: usize| {
        let env = cri::KeyValue { key: "A".to_owned(), value: vec![b'x'; bytes] };
        plan(&cri::ContainerConfig { envs: vec![env], ..fixture::container_config() })
    };
    let fits = with(LONGEST_TEXTS - 4096).expect("a plan");
    let request = berth_shim::plan::ShimRequest::Launch(Box::new(fits.plan));
    assert!(berth_shim::wire::write(berth_shim::wire::DatagramKind::Request, 0, &request).is_ok());
    let refusal = with(5_000_000).expect_err("too long");
    assert!(refusal.starts_with("arguments and environment have 5000"), "{refusal}");
}
