/* resolve NAME: what getaddrinfo of this C library says, and how many milliseconds it took. */
#include <arpa/inet.h>
#include <netdb.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>

int main(int argc, char **argv) {
	struct addrinfo hints, *all, *one;
	struct timespec began, ended;
	char text[INET6_ADDRSTRLEN];

	if (argc != 2)
		return 2;
	memset(&hints, 0, sizeof hints);
	hints.ai_socktype = SOCK_STREAM;
	clock_gettime(CLOCK_MONOTONIC, &began);
	int failed = getaddrinfo(argv[1], NULL, &hints, &all);
	clock_gettime(CLOCK_MONOTONIC, &ended);
	if (failed) {
		printf("failed: %s\n", gai_strerror(failed));
		return 1;
	}
	for (one = all; one; one = one->ai_next) {
		const void *address = one->ai_family == AF_INET ? (void *)&((struct sockaddr_in *)one->ai_addr)->sin_addr
		                                                : (void *)&((struct sockaddr_in6 *)one->ai_addr)->sin6_addr;
		printf("%s ", inet_ntop(one->ai_family, address, text, sizeof text));
	}
	printf("ms=%ld\n", (ended.tv_sec - began.tv_sec) * 1000 + (ended.tv_nsec - began.tv_nsec) / 1000000);
	return 0;
}
