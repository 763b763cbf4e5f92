//! CRI requests planned and launched for real, up to the running process.
//!
//! Needs root and `busybox-static`; without root every test reports so and passes.

use std::{
    fs::{self, Permissions},
    os::unix::fs::PermissionsExt,
    path::Path,
};

use berth_proto::cri;
use berth_runtime::launch::{
    self, Host, LaunchError, LaunchImage, LaunchInputs, MountSource, ResolvedResources, Sandbox, host,
    resolver::resolve,
};
use berth_shim::{
    child::{PodContext, make_namespaces},
    plan::{LaunchPlan, ProcessPlan},
};

use berth_testkit::launch_fixture::{
    self, LaunchFixture, MAP, NOTHING, RunningProcess, exec, is_root, start, stdout_of,
};

const PASSWD: &[u8] = b"root:x:0:0::/root:/bin/sh\nuser:x:1000:1000::/home/user:/bin/sh\n";
const GROUP: &[u8] = b"user:x:1000:\nimage:x:50000:user\n";

/// Host files of a sandbox, and a pod with all its own namespaces.
struct Pod {
    config: cri::PodSandboxConfig,
    host: Host,
}

impl Pod {
    fn new(bench: &LaunchFixture) -> Self {
        fs::create_dir_all(bench.at("sandbox/shm")).expect("makeable");
        fs::set_permissions(bench.at("sandbox/shm"), Permissions::from_mode(0o1777)).expect("settable");
        for name in ["hostname", "hosts", "resolv.conf"] {
            fs::write(bench.at("sandbox").join(name), format!("{name} of the sandbox\n")).expect("writable");
        }
        let mut config = cri::PodSandboxConfig { metadata: Some(Default::default()), ..Default::default() };
        let context = config.linux.get_or_insert_default().security_context.get_or_insert_default();
        let own = cri::NamespaceMode::Container.into();
        context.namespace_options = Some(cri::NamespaceOption { pid: own, ..Default::default() });
        context.privileged = true;
        Self { config, host: host::detect(&host::LaunchSettings::default()).expect("a host") }
    }

    fn plan(&self, bench: &LaunchFixture, config: &cri::ContainerConfig, found: &ResolvedResources) -> LaunchPlan {
        let usual = bench.plan(&[]);
        let image = LaunchImage { passwd: PASSWD.to_vec(), group: GROUP.to_vec(), ..LaunchImage::default() };
        let (files, shm) = (bench.at("sandbox"), bench.at("sandbox/shm"));
        let inputs = LaunchInputs {
            id: "c",
            config,
            sandbox: Sandbox { id: "s", config: &self.config, hostname: "pod", files: &files, shm: &shm },
            image: &image,
            host: &self.host,
            found,
            target: None,
            root: usual.root,
            groups: usual.groups,
            longest_record: 0,
            limit_ms: 20_000,
            bundle: bench.at("bundle"),
        };
        launch::launch(&inputs).expect("a plan").plan
    }

    fn found(&self, config: &cri::ContainerConfig) -> ResolvedResources {
        let mut image = |_: &cri::Mount| Err(LaunchError::missing("no image"));
        resolve(config, &self.host, &[], &mut image).expect("facts")
    }
}

fn shell(script: &str) -> cri::ContainerConfig {
    let command = ["sh", "-c", script].map(str::to_owned).into();
    cri::ContainerConfig { metadata: Some(Default::default()), command, ..Default::default() }
}

fn context(config: &mut cri::ContainerConfig) -> &mut cri::LinuxContainerSecurityContext {
    config.linux.get_or_insert_default().security_context.get_or_insert_default()
}

fn run(plan: &LaunchPlan) -> String {
    stdout_of(launch_fixture::run(plan))
}

#[test]
fn a_request_becomes_a_process() {
    if !is_root() {
        return;
    }
    let bench = LaunchFixture::new();
    let pod = Pod::new(&bench);
    bench.shim(|bench| {
        let script = "pwd; id -u; id -g; id -G; echo $HOME $HOSTNAME $X; grep -E '^(CapBnd|Seccomp):' /proc/self/status; \
                      cat /etc/hostname; echo /dev/*; echo x > /dev/shm/y && cat /dev/shm/y; readlink /dev/stdin";
        let mut config = shell(script);
        config.working_dir = "/work".to_owned();
        config.envs = vec![cri::KeyValue { key: "X".to_owned(), value: b"y=z".to_vec() }];
        let asked = context(&mut config);
        asked.run_as_user = Some(cri::Int64Value { value: 1000 });
        asked.supplemental_groups = vec![1234];
        asked.seccomp = Some(cri::SecurityProfile::default());
        let out = run(&pod.plan(bench, &config, &pod.found(&config)));
        assert_eq!(
            out,
            "/work\n1000\n1000\n1000 1234 50000\n/home/user pod y=z\nCapBnd:\t00000000a80425fb\nSeccomp:\t2\n\
             hostname of the sandbox\n/dev/core /dev/fd /dev/full /dev/mqueue /dev/null /dev/ptmx /dev/pts \
             /dev/random /dev/shm /dev/stderr /dev/stdin /dev/stdout /dev/tty /dev/urandom /dev/zero\nx\n\
             /proc/self/fd/0\n"
        );
    });
}

#[test]
fn later_processes_are_as_the_first() {
    // AC-09a-X9
    if !is_root() {
        return;
    }
    let bench = LaunchFixture::new();
    let pod = Pod::new(&bench);
    bench.shim(|bench| {
        let mut config = shell("echo up; cat");
        let asked = context(&mut config);
        asked.run_as_user = Some(cri::Int64Value { value: 1000 });
        asked.seccomp = Some(cri::SecurityProfile::default());
        asked.no_new_privs = true;
        let plan = pod.plan(bench, &config, &ResolvedResources::default());
        let mut running = start(&plan, &NOTHING).expect("it runs");
        assert_eq!(running.line(), "up");
        let later = |words: &[&str]| -> ProcessPlan {
            let words: Vec<String> = words.iter().map(|word| (*word).to_owned()).collect();
            launch::exec(&plan, "e", &words, None).expect("a plan").process
        };
        let script = "id -G; grep -E '^(NoNewPrivs|Seccomp):' /proc/self/status; mount -t tmpfs x /tmp";
        let ended = exec(&plan, running.pid, later(&["sh", "-c", script])).expect("it runs").end();
        assert_eq!(ended.out, "1000 50000\nNoNewPrivs:\t1\nSeccomp:\t2\n");
        assert_ne!(ended.code, 0, "{}", ended.err);
        assert_eq!(running.end().code, 0);
    });
}

#[test]
fn mounts_of_a_request_are_made() {
    if !is_root() {
        return;
    }
    let bench = LaunchFixture::new();
    let pod = Pod::new(&bench);
    let (volume, layer) = (bench.volume("volume"), bench.at("layers/3/d/data"));
    fs::create_dir_all(&layer).expect("makeable");
    fs::write(layer.join("file"), "of the image\n").expect("writable");
    bench.shim(|bench| {
        let script = "cat /a/file /b/file; echo new > /a/new; (echo no > /b/no) 2>/dev/null || echo read-only; \
                      cat /i/file; cat /etc/hosts /v/x; echo ${#0}; cat /proc/version; ls /proc/sys";
        let mount = |source: &Path, container_path: &str, readonly: bool| cri::Mount {
            container_path: container_path.to_owned(),
            host_path: source.to_str().expect("text").to_owned(),
            readonly,
            ..Default::default()
        };
        let mut config = shell(script);
        config.mounts = vec![
            mount(&volume, "/b", true),
            mount(&volume, "/a", false),
            mount(&volume.join("file"), "/etc/hosts", false),
            cri::Mount {
                container_path: "/i".to_owned(),
                readonly: true,
                image: Some(cri::ImageSpec { image: "i".to_owned(), ..Default::default() }),
                image_sub_path: "data".to_owned(),
                ..Default::default()
            },
        ];
        let asked = context(&mut config);
        asked.masked_paths = vec!["/proc/version".to_owned(), "/proc/sys".to_owned(), "/proc/none".to_owned()];
        let mut image =
            |_: &cri::Mount| Ok(MountSource::Image { layers: bench.at("layers"), lower: vec!["3/d".to_owned()] });
        let mut found = resolve(&config, &pod.host, &[], &mut image).expect("facts");
        let own = bench.volume("own");
        fs::write(own.join("x"), "volume of the image\n").expect("writable");
        found.volumes = [("/v".to_owned(), own)].into();
        let out = run(&pod.plan(bench, &config, &found));
        assert_eq!(out, "content\ncontent\nread-only\nof the image\ncontent\nvolume of the image\n2\n");
        assert_eq!(fs::read_to_string(volume.join("new")).expect("written"), "new\n");
    });
}

#[test]
fn privileged_containers_have_the_hosts_devices_and_rights() {
    if !is_root() {
        return;
    }
    let bench = LaunchFixture::new();
    let pod = Pod::new(&bench);
    bench.shim(|bench| {
        let script = "grep -E '^(CapEff|Seccomp):' /proc/self/status; ls -d /dev/null /dev/kmsg; \
                      mount -t tmpfs x /tmp && echo mounted; ls /dev/shm | wc -l";
        let mut config = shell(script);
        let asked = context(&mut config);
        asked.privileged = true;
        asked.seccomp = Some(cri::SecurityProfile::default());
        let out = run(&pod.plan(bench, &config, &pod.found(&config)));
        let all = pod.host.capabilities;
        assert_eq!(out, format!("CapEff:\t{all:016x}\nSeccomp:\t0\n/dev/kmsg\n/dev/null\nmounted\n0\n"));
    });
}

#[test]
fn a_pod_can_have_users_of_its_own() {
    // AC-09a-X10
    if !is_root() {
        return;
    }
    let bench = LaunchFixture::new();
    let mut pod = Pod::new(&bench);
    let line = || vec![cri::IdMapping { host_id: MAP.outside, container_id: MAP.inside, length: MAP.count }];
    let users = cri::UserNamespace { uids: line(), gids: line(), ..Default::default() };
    let linux = pod.config.linux.get_or_insert_default();
    linux.sysctls = [("kernel.shm_rmid_forced".to_owned(), "1".to_owned())].into();
    let options = linux.security_context.get_or_insert_default().namespace_options.get_or_insert_default();
    options.userns_options = Some(users);
    let asked = options.clone();
    if !pod.host.has_user_namespaces {
        return eprintln!("skipped: the kernel has no user namespaces for pods");
    }
    bench.shim(|bench| {
        let wanted = launch::namespaces(&pod.config, "pod", &pod.host).expect("a plan");
        let made = make_namespaces(&wanted).expect("namespaces");
        let around = PodContext { namespaces: &made.namespaces, target: None, users: wanted.users };
        let script = "cat /proc/self/uid_map; id -u; hostname; stat -c %u /etc/hosts /dev/null /; echo x > /made; \
                      cat /proc/sys/kernel/shm_rmid_forced /proc/sys/net/ipv4/ip_unprivileged_port_start; \
                      grep Seccomp: /proc/self/status";
        let mut config = shell(script);
        context(&mut config).namespace_options = Some(asked.clone());
        context(&mut config).seccomp = Some(cri::SecurityProfile::default());
        let plan = pod.plan(bench, &config, &pod.found(&config));
        let out = stdout_of(start(&plan, &around).map(RunningProcess::end));
        let words: Vec<&str> = out.split_whitespace().collect();
        assert_eq!(words, ["0", "200000", "65536", "0", "pod", "0", "0", "0", "1", "0", "Seccomp:", "2"], "{out}");
        let owner = std::os::unix::fs::MetadataExt::uid(&fs::metadata(bench.at("u/made")).expect("made"));
        assert_eq!(owner, MAP.outside);
    });
}
