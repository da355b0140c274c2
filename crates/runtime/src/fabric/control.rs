//! The control thread: makes and accepts connections, carries control messages, watches
//! the sockets that no thread polls, and notices when a peer ends.

use std::collections::HashMap;
use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr as UnixAddr, UnixListener, UnixStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use nix::sys::signal::{SigSet, SigmaskHow, pthread_sigmask};
use nix::sys::socket::{ControlMessage, ControlMessageOwned, MsgFlags, recvmsg, sendmsg};
use socket2::SockRef;
use tokio::io::unix::AsyncFd;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, Interest};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::time::timeout;

use super::fork::CloseInChild;
use super::{Bit, Fabric, Peer, interface};
use crate::Error;
use crate::config::Config;
use crate::link::Link;
use crate::transport::peer_memory::PeerMemory;
use crate::transport::region::Mapping;
use crate::transport::ring::{Consumer, Producer, RING_FOOTPRINT};
use crate::transport::shm::Shm;
use crate::transport::tcp::{Tcp, choose_congestion_control};
use crate::wire::{Control, Hello, MESSAGE_MAX, ProcessInfo};

/// How long the first messages on a new connection may take.
const HANDSHAKE: Duration = Duration::from_secs(10);
/// How long one address is tried before the next.
const CONNECT: Duration = Duration::from_secs(3);
/// While a thread polls a connection itself, the control thread looks this rarely.
const HOT_MILLISECONDS: u64 = 2;

/// The other threads' hold on the control thread.
pub(super) struct Handle {
    runtime: tokio::runtime::Handle,
    epoll: Arc<Epoll>,
    /// Data connections that fill the interface through which other hosts are reached.
    streams: u32,
}

pub(super) struct Listeners {
    /// `None`: this process cannot share memory.
    pub(super) unix: Option<UnixListener>,
    tcp: TcpListener,
    /// See [`Handle`].
    pub(super) streams: u32,
}

fn unix_name(process: u128) -> io::Result<UnixAddr> {
    UnixAddr::from_abstract_name(format!("tpu_dist-{process:032x}"))
}

/// Opens the listening sockets; returns them and the TCP addresses to publish.
pub(super) fn listen(config: &Config, process: u128) -> Result<(Listeners, Vec<String>), Error> {
    let (candidates, why) = interface::choose(config)?;
    let tcp = listen_tcp().map_err(|error| Error::Network(format!("listening: {error}")))?;
    // Said here and now, not when a peer connects.
    choose_congestion_control(&SockRef::from(&tcp))
        .map_err(|error| Error::Network(error.to_string()))?;
    let local = tcp
        .local_addr()
        .map_err(|error| Error::Network(format!("listening: {error}")))?;
    let addresses: Vec<String> = candidates
        .iter()
        .filter(|candidate| candidate.address.is_ipv4() || local.is_ipv6())
        .map(|candidate| SocketAddr::new(candidate.address, local.port()).to_string())
        .collect();
    if let Some(first) = candidates.first() {
        tracing::info!(
            "peers on other hosts reach this process at {} ({}): {why}",
            SocketAddr::new(first.address, local.port()),
            first.interface
        );
    }
    let unix = unix_name(process).and_then(|name| UnixListener::bind_addr(&name));
    let unix = unix
        .map_err(|error| tracing::warn!("no shared memory between processes, using TCP: {error}"))
        .ok();
    let streams = candidates
        .first()
        .map_or(1, |first| interface::streams(&first.interface));
    Ok((Listeners { unix, tcp, streams }, addresses))
}

fn listen_tcp() -> io::Result<TcpListener> {
    use socket2::{Domain, Protocol, Socket, Type};
    let bind = |domain, address: SocketAddr| {
        let socket = Socket::new(domain, Type::STREAM, Some(Protocol::TCP))?;
        if domain == Domain::IPV6 {
            socket.set_only_v6(false)?;
        }
        socket.bind(&address.into())?;
        socket.listen(1024)?;
        Ok(socket.into())
    };
    bind(Domain::IPV6, ([0u16; 8], 0).into())
        .or_else(|_: io::Error| bind(Domain::IPV4, ([0, 0, 0, 0], 0).into()))
}

impl Handle {
    pub(super) fn new(streams: u32) -> Result<(Handle, tokio::runtime::Runtime), Error> {
        let failed =
            |error: io::Error| Error::Resource(format!("starting the control thread: {error}"));
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(failed)?;
        let epoll =
            Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC).map_err(|error| failed(error.into()))?;
        Ok((
            Handle {
                runtime: runtime.handle().clone(),
                epoll: Arc::new(epoll),
                streams,
            },
            runtime,
        ))
    }

    /// Connects in the background; a failure lands in `failures`.
    pub(super) fn connect(
        &self,
        fabric: Arc<Fabric>,
        info: ProcessInfo,
        deadline: Instant,
        failures: Arc<Mutex<HashMap<u128, String>>>,
    ) {
        self.runtime.spawn(async move {
            let process = info.process;
            let result = if info.domain == fabric.info.domain {
                connect_unix(&fabric, info).await
            } else {
                connect_tcp(&fabric, info, deadline).await
            };
            if let Err(error) = result {
                failures
                    .lock()
                    .expect("no panic while failures are held")
                    .insert(process, error.to_string());
                fabric.peer_added.notify_all();
            }
        });
    }

    /// Watches a peer's data connections until something happens on one.
    pub(super) fn arm(&self, peer: &Peer) {
        peer.link.descriptors(|fd, writing| {
            let mut flags = EpollFlags::EPOLLIN | EpollFlags::EPOLLONESHOT;
            if writing {
                flags |= EpollFlags::EPOLLOUT;
            }
            // Fails only for a connection that has just been closed: nothing to watch then.
            let _ = self
                .epoll
                .modify(fd, &mut EpollEvent::new(flags, peer_id(peer)));
        });
    }

    /// Says goodbye to all peers, and waits until that is written.
    pub(super) fn goodbye(&self, fabric: &Fabric, wait: Duration) {
        let peers: Vec<Arc<Peer>> = fabric
            .peers
            .lock()
            .expect("no panic while peers are held")
            .values()
            .cloned()
            .collect();
        // Peers close the connection when they read it, some before others do.
        fabric.leaving.store(true, Ordering::Release);
        for peer in &peers {
            peer.tell(Control::Goodbye);
        }
        let deadline = Instant::now() + wait;
        let waiting =
            |peer: &Arc<Peer>| peer.gone().is_none() && !peer.said_goodbye.load(Ordering::Acquire);
        while peers.iter().any(waiting) && Instant::now() < deadline {
            std::thread::sleep(Duration::from_micros(100));
        }
    }
}

/// The address of a peer serves as its number: peers do not move.
fn peer_id(peer: &Peer) -> u64 {
    std::ptr::from_ref(peer) as u64
}

/// Starts the control thread.
pub(super) fn start(
    fabric: Arc<Fabric>,
    listeners: Listeners,
    runtime: tokio::runtime::Runtime,
) -> Result<(), Error> {
    let keep = CloseInChild::new(&listeners.tcp);
    let keep_unix = listeners.unix.as_ref().map(CloseInChild::new);
    let run = move || {
        let _keep = (keep, keep_unix);
        // Signals are for the user's threads.
        let _ = pthread_sigmask(SigmaskHow::SIG_SETMASK, Some(&SigSet::all()), None);
        runtime.block_on(async move {
            if let Some(unix) = listeners.unix {
                tokio::spawn(accept_unix(fabric.clone(), unix));
            }
            tokio::spawn(accept_tcp(fabric.clone(), listeners.tcp));
            watch(fabric).await;
        });
    };
    std::thread::Builder::new()
        .name("tpu_dist-ctl".to_owned())
        .spawn(run)
        .map_err(|error| Error::Resource(format!("starting the control thread: {error}")))?;
    Ok(())
}

/// Handles data connections that nobody polls.
async fn watch(fabric: Arc<Fabric>) {
    let epoll = fabric.control.epoll.clone();
    // SAFETY: `epoll` keeps the descriptor open as long as this function runs.
    let ready = unsafe { AsyncFd::register_with_interest(epoll.0.as_raw_fd(), Interest::READABLE) };
    let Ok(ready) = ready else {
        tracing::error!("cannot watch connections");
        return std::future::pending().await;
    };
    loop {
        let Ok(mut guard) = ready.readable().await else {
            continue;
        };
        let mut events = [EpollEvent::empty(); 64];
        let count = epoll.wait(&mut events, EpollTimeout::ZERO).unwrap_or(0);
        if count == 0 {
            guard.clear_ready();
            continue;
        }
        for event in &events[..count] {
            let remote = fabric.remote.read().expect("no panic while peers are held");
            let Some(peer) = remote
                .iter()
                .find(|peer| peer_id(peer) == event.data())
                .cloned()
            else {
                continue;
            };
            drop(remote);
            let polled = peer.polled.load(Ordering::Relaxed);
            if fabric.milliseconds().saturating_sub(polled) <= HOT_MILLISECONDS && polled > 0 {
                let fabric = fabric.clone();
                tokio::spawn(async move {
                    tokio::time::sleep(Duration::from_millis(HOT_MILLISECONDS)).await;
                    fabric.control.arm(&peer);
                });
            } else {
                peer.link.progress();
                fabric.ring_own();
                fabric.control.arm(&peer);
            }
        }
    }
}

// ---- connections through shared memory ----

async fn accept_unix(fabric: Arc<Fabric>, listener: UnixListener) {
    let listener = listener
        .set_nonblocking(true)
        .and_then(|()| tokio::net::UnixListener::from_std(listener));
    let Ok(listener) = listener else { return };
    loop {
        match listener.accept().await {
            Ok((stream, _)) => {
                let fabric = fabric.clone();
                tokio::spawn(async move {
                    if let Err(error) = timeout(HANDSHAKE, answer_unix(&fabric, stream)).await {
                        tracing::debug!("a connection was not completed: {error}");
                    }
                });
            }
            // Out of descriptors, most likely.
            Err(_) => tokio::time::sleep(Duration::from_millis(10)).await,
        }
    }
}

async fn connect_unix(fabric: &Arc<Fabric>, info: ProcessInfo) -> io::Result<()> {
    let stream = UnixStream::connect_addr(&unix_name(info.process)?)?;
    stream.set_nonblocking(true)?;
    let stream = tokio::net::UnixStream::from_std(stream)?;
    let seat = Seat::take(fabric)?;
    let hello = seat.hello(info.token);
    send_with_region(fabric, &stream, &hello).await?;
    let (hello, region) = timeout(HANDSHAKE, receive_with_region(&stream)).await??;
    if hello.info.process != info.process || hello.token != fabric.info.token {
        return Err(invalid("another process answered"));
    }
    seat.meet(stream, hello, region)
}

async fn answer_unix(fabric: &Arc<Fabric>, stream: tokio::net::UnixStream) -> io::Result<()> {
    let (hello, region) = receive_with_region(&stream).await?;
    if hello.token != fabric.info.token {
        return Err(invalid("a process that did not read the store connected"));
    }
    let seat = Seat::take(fabric)?;
    send_with_region(fabric, &stream, &seat.hello(hello.info.token)).await?;
    seat.meet(stream, hello, region)
}

/// What this process reserves for a peer on the same host.
struct Seat<'a> {
    fabric: &'a Arc<Fabric>,
    bit: u32,
    ring: usize,
    met: bool,
}

impl<'a> Seat<'a> {
    fn take(fabric: &'a Arc<Fabric>) -> io::Result<Seat<'a>> {
        let bit = fabric.take_bit().map_err(io::Error::other)?;
        let mut seat = Seat {
            fabric,
            bit,
            ring: 0,
            met: false,
        };
        seat.ring = fabric
            .region
            .allocate(RING_FOOTPRINT)
            .map_err(io::Error::other)?;
        Ok(seat)
    }

    fn hello(&self, token: u128) -> Hello {
        Hello {
            info: self.fabric.info.clone(),
            token,
            stream: 0,
            streams: 0,
            ring: self.ring as u64,
            inbox_bit: self.bit,
            identity: std::ptr::from_ref(&self.fabric.info.process) as u64,
        }
    }

    /// Makes the peer.
    fn meet(
        mut self,
        stream: tokio::net::UnixStream,
        hello: Hello,
        region: OwnedFd,
    ) -> io::Result<()> {
        let mapping = Arc::new(Mapping::new(region.as_fd()).map_err(io::Error::other)?);
        if !mapping.is_valid() {
            return Err(invalid("the shared memory of the peer has another layout"));
        }
        let outgoing = mapping
            .at(hello.ring as usize, RING_FOOTPRINT)
            .map_err(io::Error::other)?;
        let own = self.fabric.region.clone();
        let incoming = own
            .mapping
            .at(self.ring, RING_FOOTPRINT)
            .map_err(io::Error::other)?;
        // SAFETY: the peer reserved its ring for this process and named it in its hello;
        // this process reserved the other; both stay mapped as long as `Shm` holds the
        // mappings. Each process makes one producer and one consumer.
        let (producer, consumer) = unsafe { (Producer::new(outgoing), Consumer::new(incoming)) };
        let memory = peer_memory(&stream, &hello);
        let link = Link::new(self.fabric.any_source.clone());
        link.add_stream(Box::new(Shm::new(
            producer,
            consumer,
            mapping.clone(),
            memory,
            hello.inbox_bit,
            own,
        )));
        self.met = true;
        let keep = CloseInChild::new(&stream);
        let seat = Some((self.bit, self.ring));
        start_peer(
            self.fabric,
            hello.info,
            Some(mapping),
            memory,
            link,
            seat,
            stream,
            vec![keep],
            None,
        );
        Ok(())
    }
}

impl Drop for Seat<'_> {
    fn drop(&mut self) {
        if !self.met {
            self.fabric.set_bit(self.bit, Bit::Free);
            if self.ring != 0 {
                self.fabric.region.release(self.ring, RING_FOOTPRINT);
            }
        }
    }
}

/// The memory of the process that said `hello`, where this one may read it.
fn peer_memory(stream: &tokio::net::UnixStream, hello: &Hello) -> Option<PeerMemory> {
    if !Config::get().cross_memory {
        return None;
    }
    // The process's number here, which in its own namespace may be another.
    let pid = stream.peer_cred().ok()?.pid()?;
    let memory = PeerMemory::find(pid, hello.identity, hello.info.process);
    if memory.is_none() {
        tracing::debug!("the memory of pid {pid} cannot be read: data goes through shared memory");
    }
    memory
}

async fn send_with_region(
    fabric: &Fabric,
    stream: &tokio::net::UnixStream,
    hello: &Hello,
) -> io::Result<()> {
    let bytes = prefixed(&hello.encode());
    let fds = [fabric.region.fd().as_raw_fd()];
    let sent = stream
        .async_io(Interest::WRITABLE, || {
            let message = [ControlMessage::ScmRights(&fds)];
            let parts = [io::IoSlice::new(&bytes)];
            Ok(sendmsg::<()>(
                stream.as_raw_fd(),
                &parts,
                &message,
                MsgFlags::MSG_NOSIGNAL,
                None,
            )?)
        })
        .await?;
    // A hello is far smaller than a socket's buffer.
    if sent == bytes.len() {
        Ok(())
    } else {
        Err(invalid("a hello was cut short"))
    }
}

async fn receive_with_region(stream: &tokio::net::UnixStream) -> io::Result<(Hello, OwnedFd)> {
    let mut bytes = Vec::new();
    let mut region = None;
    loop {
        let (read, fd) = stream
            .async_io(Interest::READABLE, || {
                let mut buffer = [0; 4096];
                let mut space = nix::cmsg_space!([std::os::fd::RawFd; 1]);
                let mut parts = [io::IoSliceMut::new(&mut buffer)];
                let flags = MsgFlags::MSG_CMSG_CLOEXEC;
                let message =
                    recvmsg::<()>(stream.as_raw_fd(), &mut parts, Some(&mut space), flags)?;
                let mut received = None;
                for control in message.cmsgs()? {
                    if let ControlMessageOwned::ScmRights(fds) = control {
                        for fd in fds {
                            // SAFETY: the kernel made this descriptor for this process, just now,
                            // and nothing else owns it.
                            received = Some(unsafe { OwnedFd::from_raw_fd(fd) });
                        }
                    }
                }
                let count = message.bytes;
                Ok((buffer[..count].to_vec(), received))
            })
            .await?;
        if read.is_empty() {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        bytes.extend_from_slice(&read);
        region = region.or(fd);
        if let Some((length, body)) = bytes.split_first_chunk() {
            let length = u32::from_le_bytes(*length) as usize;
            if length > MESSAGE_MAX || body.len() > length {
                return Err(invalid("a malformed hello came"));
            }
            if body.len() == length {
                let hello = Hello::decode(body).ok_or_else(|| invalid("a malformed hello came"))?;
                let region = region.ok_or_else(|| invalid("a hello came without shared memory"))?;
                return Ok((hello, region));
            }
        }
    }
}

// ---- connections through TCP ----

/// What has come of the connections of one peer.
struct Partial {
    hello: Hello,
    control: Option<tokio::net::TcpStream>,
    data: Vec<tokio::net::TcpStream>,
}

async fn accept_tcp(fabric: Arc<Fabric>, listener: TcpListener) {
    let listener = listener
        .set_nonblocking(true)
        .and_then(|()| tokio::net::TcpListener::from_std(listener));
    let Ok(listener) = listener else { return };
    let partial: Arc<Mutex<HashMap<u128, Partial>>> = Arc::default();
    loop {
        match listener.accept().await {
            Ok((stream, from)) => {
                let (fabric, partial) = (fabric.clone(), partial.clone());
                tokio::spawn(async move {
                    match timeout(HANDSHAKE, answer_tcp(&fabric, stream, &partial)).await {
                        Ok(Ok(())) => {}
                        Ok(Err(error)) => {
                            tracing::debug!("a connection from {from} was refused: {error}")
                        }
                        Err(error) => {
                            tracing::debug!("a connection from {from} was not completed: {error}")
                        }
                    }
                });
            }
            Err(_) => tokio::time::sleep(Duration::from_millis(10)).await,
        }
    }
}

async fn answer_tcp(
    fabric: &Arc<Fabric>,
    mut stream: tokio::net::TcpStream,
    partial: &Mutex<HashMap<u128, Partial>>,
) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let hello = read_hello(&mut stream).await?;
    if hello.token != fabric.info.token || hello.streams == 0 || hello.streams > 16 {
        return Err(invalid("it did not read the store"));
    }
    let answer = tcp_hello(fabric, hello.info.token, hello.stream, hello.streams);
    stream.write_all(&prefixed(&answer.encode())).await?;
    let process = hello.info.process;
    let complete = {
        let mut partial = partial
            .lock()
            .expect("no panic while partial connections are held");
        let entry = partial.entry(process).or_insert_with(|| Partial {
            hello: hello.clone(),
            control: None,
            data: Vec::new(),
        });
        if hello.stream == 0 {
            entry.control = Some(stream);
        } else {
            entry.data.push(stream);
        }
        let complete = entry.control.is_some() && entry.data.len() == entry.hello.streams as usize;
        if complete {
            partial.remove(&process)
        } else {
            None
        }
    };
    match complete {
        Some(Partial {
            hello,
            control: Some(control),
            data,
        }) => start_tcp_peer(fabric, hello.info, control, data),
        _ => Ok(()),
    }
}

async fn connect_tcp(fabric: &Arc<Fabric>, info: ProcessInfo, deadline: Instant) -> io::Result<()> {
    let same_machine = info.machine == fabric.info.machine;
    let usable = |address: &&SocketAddr| {
        // Loopback reaches this network namespace only.
        !address.ip().is_loopback()
            || (same_machine
                && fabric.info.addresses.iter().any(|own| {
                    own.parse::<SocketAddr>()
                        .is_ok_and(|own| own.ip() == address.ip())
                }))
    };
    let all: Vec<SocketAddr> = info
        .addresses
        .iter()
        .filter_map(|text| text.parse().ok())
        .collect();
    let addresses: Vec<SocketAddr> = all.iter().filter(usable).copied().collect();
    if addresses.is_empty() {
        return Err(invalid(&format!(
            "it has no address that another host can reach, only {}; set TPU_DIST_SOCKET_IFNAME there",
            info.addresses.join(", ")
        )));
    }
    let mut tried = Vec::new();
    // The listener exists before its address is published, so a refusal is final, but a
    // packet may be lost: all addresses are tried until the deadline.
    loop {
        for &address in &addresses {
            match timeout(CONNECT, open_all(fabric, &info, address)).await {
                Ok(Ok((control, data))) => return start_tcp_peer(fabric, info, control, data),
                Ok(Err(error)) => tried.push(format!("{address}: {error}")),
                Err(_) => tried.push(format!("{address}: no answer in {CONNECT:?}")),
            }
        }
        if Instant::now() + CONNECT > deadline || tried.len() >= 3 * addresses.len() {
            tried.truncate(addresses.len());
            return Err(invalid(&tried.join("; ")));
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

async fn open_all(
    fabric: &Fabric,
    info: &ProcessInfo,
    address: SocketAddr,
) -> io::Result<(tokio::net::TcpStream, Vec<tokio::net::TcpStream>)> {
    let streams = Config::get().streams.unwrap_or(fabric.control.streams);
    let mut opened = Vec::new();
    for number in 0..=streams {
        let mut stream = tokio::net::TcpStream::connect(address).await?;
        stream.set_nodelay(true)?;
        let hello = tcp_hello(fabric, info.token, number, streams);
        stream.write_all(&prefixed(&hello.encode())).await?;
        let answer = read_hello(&mut stream).await?;
        if answer.info.process != info.process || answer.token != fabric.info.token {
            return Err(invalid("another process answered"));
        }
        opened.push(stream);
    }
    let data = opened.split_off(1);
    Ok((
        opened
            .pop()
            .expect("the control connection was opened first"),
        data,
    ))
}

fn tcp_hello(fabric: &Fabric, token: u128, stream: u32, streams: u32) -> Hello {
    Hello {
        info: fabric.info.clone(),
        token,
        stream,
        streams,
        ring: 0,
        inbox_bit: 0,
        identity: 0,
    }
}

async fn read_hello(stream: &mut tokio::net::TcpStream) -> io::Result<Hello> {
    let bytes = read_message(stream).await?;
    Hello::decode(&bytes).ok_or_else(|| invalid("a malformed hello came"))
}

fn start_tcp_peer(
    fabric: &Arc<Fabric>,
    info: ProcessInfo,
    control: tokio::net::TcpStream,
    data: Vec<tokio::net::TcpStream>,
) -> io::Result<()> {
    let link = Link::new(fabric.any_source.clone());
    let mut keep = vec![CloseInChild::new(&control)];
    for stream in data {
        let stream: TcpStream = stream.into_std()?;
        keep.push(CloseInChild::new(&stream));
        link.add_stream(Box::new(Tcp::new(stream)?));
    }
    let heartbeat = Some(Config::get().heartbeat);
    let peer = start_peer(
        fabric, info, None, None, link, None, control, keep, heartbeat,
    );
    peer.link.descriptors(|fd, _| {
        let event = EpollEvent::new(EpollFlags::EPOLLONESHOT, peer_id(&peer));
        if let Err(error) = fabric.control.epoll.add(fd, event) {
            tracing::error!("cannot watch a connection: {error}");
        }
    });
    fabric.control.arm(&peer);
    Ok(())
}

// ---- the control connection ----

#[allow(
    clippy::too_many_arguments,
    reason = "the parts of a peer, each used once"
)]
fn start_peer(
    fabric: &Arc<Fabric>,
    info: ProcessInfo,
    mapping: Option<Arc<Mapping>>,
    memory: Option<PeerMemory>,
    link: Link,
    seat: Option<(u32, usize)>,
    stream: impl AsyncRead + AsyncWrite + Send + 'static,
    keep: Vec<CloseInChild>,
    heartbeat: Option<Duration>,
) -> Arc<Peer> {
    let (sender, receiver): (UnboundedSender<Control>, _) = unbounded_channel();
    let peer = Arc::new(Peer {
        info,
        mapping,
        memory,
        link,
        control: sender,
        seat,
        said_goodbye: AtomicBool::new(false),
        gone: OnceLock::new(),
        polled: AtomicU64::new(0),
    });
    fabric.add_peer(peer.clone());
    let (reader, writer) = tokio::io::split(stream);
    let writing = tokio::spawn(write_control(peer.clone(), writer, receiver, heartbeat));
    let (fabric, read_peer) = (fabric.clone(), peer.clone());
    tokio::spawn(async move {
        let (reason, in_order) = read_control(&fabric, &read_peer, reader, heartbeat).await;
        fabric.peer_gone(&read_peer, reason, in_order);
        writing.abort();
        drop(keep);
    });
    peer
}

async fn write_control(
    peer: Arc<Peer>,
    mut writer: impl AsyncWrite + Unpin,
    mut messages: UnboundedReceiver<Control>,
    heartbeat: Option<Duration>,
) {
    loop {
        let next = match heartbeat {
            Some(silence) => match timeout(silence / 4, messages.recv()).await {
                Ok(next) => next,
                Err(_) => Some(Control::Heartbeat),
            },
            None => messages.recv().await,
        };
        let Some(message) = next else { return };
        if writer
            .write_all(&prefixed(&message.encode()))
            .await
            .is_err()
        {
            // The reader sees why.
            return;
        }
        if message == Control::Goodbye {
            peer.said_goodbye.store(true, Ordering::Release);
        }
    }
}

/// Reads until the connection ends; returns why it did, and whether in good order.
async fn read_control(
    fabric: &Fabric,
    peer: &Arc<Peer>,
    mut reader: impl AsyncRead + Unpin,
    heartbeat: Option<Duration>,
) -> (String, bool) {
    loop {
        let read = read_message(&mut reader);
        let bytes = match heartbeat {
            Some(silence) => match timeout(silence, read).await {
                Ok(read) => read,
                Err(_) => return (format!("nothing was heard from it for {silence:?}"), false),
            },
            None => read.await,
        };
        match bytes {
            Ok(bytes) => match Control::decode(&bytes) {
                Some(Control::Goodbye) => return ("its process has ended".to_owned(), true),
                Some(message) => fabric.handle(peer, message),
                None => return ("it sent a malformed message".to_owned(), false),
            },
            Err(_) if fabric.leaving.load(Ordering::Acquire) => {
                return ("this process ends".to_owned(), true);
            }
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                return ("its process died".to_owned(), false);
            }
            Err(error) => return (format!("its connection failed: {error}"), false),
        }
    }
}

async fn read_message(reader: &mut (impl AsyncRead + Unpin)) -> io::Result<Vec<u8>> {
    let length = reader.read_u32_le().await? as usize;
    if length > MESSAGE_MAX {
        return Err(invalid("a message came that is too long"));
    }
    let mut bytes = vec![0; length];
    reader.read_exact(&mut bytes).await?;
    Ok(bytes)
}

fn prefixed(bytes: &[u8]) -> Vec<u8> {
    let mut message = (bytes.len() as u32).to_le_bytes().to_vec();
    message.extend_from_slice(bytes);
    message
}

fn invalid(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}
